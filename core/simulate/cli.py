"""`harli simulate` and `harli whatif`, for `core.cli` to mount."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from shutil import get_terminal_size
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from core.errors import Invalid

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DeviceName = Annotated[
    str, typer.Option("--device", help="h200, ada6000, a100, or the path of a profile (`harli profile` writes one).")
]
_MAX_TARGET_MS = 600_000.0
_out = Console(highlight=False, width=max(100, get_terminal_size().columns))  # a table has up to nine columns


def simulate(
    trace: Annotated[Path, typer.Argument(help="Azure CSV, BurstGPT CSV or Mooncake JSONL.")],
    device: DeviceName = "h200",
    policies: Annotated[
        list[str] | None, typer.Option("--policy", help="May be given several times; solo and hybrid otherwise.")
    ] = None,
    targets: Annotated[
        list[float] | None,
        typer.Option("--target", help="ms; may be given several times; 1.5, 2 and 4 times solo's p99 otherwise."),
    ] = None,
    kind: Annotated[str, typer.Option("--kind", help="itl (each gap) or tpot (a request's mean gap).")] = "itl",
    start: Annotated[float, typer.Option("--start", min=0, help="Second of the trace to begin at.")] = 0.0,
    seconds: Annotated[float | None, typer.Option("--seconds", min=1, help="How long; to the end otherwise.")] = None,
    every: Annotated[int, typer.Option("--every", min=1, help="Take every n-th request only.")] = 1,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=2, help="Leave longer requests out.")] = None,
    prefill: Annotated[str, typer.Option("--prefill", help="elsewhere (decode only) or here.")] = "elsewhere",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the noise.")] = 0,
    html: Annotated[Path | None, typer.Option("--html", help="Also write a report with charts.")] = None,
    as_json: AsJson = False,
) -> None:
    """Replay a trace through the policies on a simulated device."""
    from core.simulate.command import simulate as run
    from core.simulate.report import columns, page

    for name, value, known in (("kind", kind, ("itl", "tpot")), ("prefill", prefill, ("elsewhere", "here"))):
        if value not in known:
            raise Invalid("option", f"--{name} is {value!r}; give {' or '.join(known)}", name)
    status = Console(stderr=True)
    with status.status("reading the trace") as line:
        report, timeline = run(
            trace, device, policies or ("solo", "hybrid"), targets or (), start_s=start, seconds=seconds, every=every,
            max_tokens=max_tokens, target_kind=kind, prefill=prefill, seed=seed,  # type: ignore[arg-type]
            progress=lambda policy, target: line.update(f"{policy} at {target:g} ms"),
        )  # fmt: skip
    if html is not None:
        html.write_text(page(report, timeline, report.rows[-1]))
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
        return
    grid = Table(box=None, pad_edge=False, header_style="bold")
    shown = columns(report)
    for name, _ in shown:
        grid.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for row in report.rows:
        grid.add_row(*(value(row) for _, value in shown))
    asked = f"{report.requests} requests in {report.seconds:g} s"
    _out.print(f"{report.trace} on {report.device}: {asked}, latencies in ms")
    _out.print(grid)
    for note in report.notes:
        _out.print(f"note: {note}")
    if html is not None:
        _out.print(f"report: {html}")


def whatif(
    target: Annotated[str, typer.Option("--target", help="Targets in ms: 12, or a range such as 8..60.")] = "8..60",
    batch: Annotated[int, typer.Option("--batch", min=0, help="Running requests.")] = 32,
    kv_tokens: Annotated[int | None, typer.Option("--kv-tokens", min=0, help="1,024 a request otherwise.")] = None,
    now: Annotated[float | None, typer.Option("--now", help="The present target: marks the operating point.")] = None,
    policy: Annotated[str, typer.Option("--policy")] = "hybrid",
    device: DeviceName = "h200",
    as_json: AsJson = False,
) -> None:
    """What finetuning would get at each target under a load that stays as it is."""
    from core.simulate.command import Load, Operating
    from core.simulate.command import whatif as run

    load = Load(batch, batch * 1024 if kv_tokens is None else kv_tokens)
    found = run(load, device, targets_of(target), policy_name=policy, now_ms=now)
    if as_json:
        print(json.dumps(asdict(found), indent=2))
        return
    _out.print(
        f"{found.policy} on {found.device}, {load.batch} requests with {load.kv_tokens} KV tokens: "
        f"solo step {found.solo_ms:.2f} ms, finetuning alone {found.exclusive_tokens_s:,.0f} tokens/s"
    )
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("target ms", "finetune tok/s", "of exclusive", "ITL p50", "ITL p99", "attained", "layout"):
        grid.add_column(name, justify="left" if name == "layout" else "right")

    def add(point: Operating, mark: str = "") -> None:
        grid.add_row(
            f"{mark}{point.target_ms:g}", f"{point.finetune_tokens_s:,.0f}", f"{100 * point.exclusive_share:.1f} %",
            _ms(point.itl_p50_ms), _ms(point.itl_p99_ms), f"{100 * point.attainment:.2f} %", point.layout,
        )  # fmt: skip

    for point in found.points:
        if found.now is None or point.target_ms != found.now.target_ms:
            add(point)
    if found.now is not None:
        add(found.now, "now ")
    _out.print(grid)
    for note in found.notes:
        _out.print(f"note: {note}")


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def targets_of(text: str) -> list[float]:
    """``12`` → [12]; ``8..60`` → about a dozen targets from 8 to 60, closer together where they are small."""
    try:
        bounds = [float(part) for part in text.split("..")]
    except ValueError:
        bounds = []
    if len(bounds) == 1 and 0 < bounds[0] <= _MAX_TARGET_MS:
        return bounds
    if len(bounds) != 2 or not 0 < bounds[0] < bounds[1] <= _MAX_TARGET_MS:
        raise Invalid("target", f"--target is {text!r}; give ms such as 12, or a range such as 8..60", "target")
    low, high = bounds
    return [round(low * (high / low) ** (step / 12), 1) for step in range(13)]
