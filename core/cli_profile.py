"""`harli profile`, for `core.cli` to mount: what was measured of this machine, and having it measured again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from core.cli_shared import AsJson, settings
from core.predictor.profile import Profile, read_profile

group = typer.Typer(invoke_without_command=True)


@group.callback()
def redo(ctx: typer.Context) -> None:
    """Have this machine's GPU measured again.

    An engine measures its GPU at its first start, in less than a minute, and keeps that as a profile. Without a command
    this removes the profiles, so that the next start of the engine takes a new one.
    """
    if ctx.invoked_subcommand is not None:
        return
    from core.printing import say
    from core.runtime.profiles import forget

    removed = forget(_folder())
    for path in removed:
        say(f"removed {path}")
    say("The engine measures its GPU at its next start; stop `harli up` and start it again.")


@group.command("show")
def show(
    path: Annotated[Path | None, typer.Argument(help="A profile; all of this machine's otherwise.")] = None,
    json: AsJson = False,
) -> None:
    """Show the profiles that predictions are made from; `harli simulate --device PATH` simulates one."""
    from core import printing

    paths = [path] if path is not None else sorted(_folder().glob("*.json"))
    found = [(one, read_profile(one)) for one in paths]
    if json:
        printing.as_json([profile for _, profile in found])
        return
    if not found:
        printing.say(f"No profile in {_folder()}: an engine on a GPU takes one at its first start.")
    for number, (one, profile) in enumerate(found):
        if number:
            printing.say("")
        printing.facts([("profile", one), *_facts(profile)])


def _facts(profile: Profile) -> list[tuple[str, object]]:
    machine, batch = profile.machine, profile.micro_batch
    layouts = list(dict.fromkeys(point.layout for point in profile.points))
    whole = [point for point in profile.points if point.layout.kind == "whole"]
    least, most = min(whole, key=lambda p: p.ms), max(whole, key=lambda p: p.ms)
    return [
        ("GPU", f"{machine.gpu}, {machine.sms} SMs, driver {machine.driver}"),
        ("engine", f"{machine.engine}, {machine.model}, {machine.dtype}"),
        ("measured", profile.measured or None),
        ("steps", f"{len(profile.points)} points, batches to {max(profile.captured)}"),
        ("alone", f"{least.ms:.2f} ms ({least.batch} requests of {least.max_kv} tokens) to {most.ms:.2f} ms "
                  f"({most.batch} of {most.max_kv})"),
        ("layouts", ", ".join(str(layout) for layout in layouts)),
        ("micro-batch", f"{batch.tokens} tokens, rank {batch.rank}, {batch.layers} layers" if batch else None),
    ]  # fmt: skip


def _folder() -> Path:
    from core.runtime.profiles import PROFILES

    return settings().data_dir / PROFILES
