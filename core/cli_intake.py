"""`harli datasets` and `harli adapters` beyond storing and deploying: looks at files and rows, aliases, merges."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from core.cli_shared import AsJson, Named, connected, pair, plain

if TYPE_CHECKING:
    from core.api import schemas

Alias = Annotated[str, typer.Argument(metavar="ALIAS", help="Such as prod: served as NAME@prod.")]
Version = Annotated[int | None, typer.Option("--version", min=1, help="A version; else the newest.")]


def mount(datasets: typer.Typer, adapters: typer.Typer) -> None:
    """Add the commands to `harli datasets` and `harli adapters`."""
    datasets.command("preview")(preview)
    datasets.command("rows")(rows)
    adapters.command("show")(show)
    adapters.command("promote")(promote)
    adapters.command("rollback")(rollback)
    adapters.command("unalias")(unalias)
    adapters.command("merge")(merge)
    adapters.command("export")(export)


# ---- data sets -------------------------------------------------------------------------------------------------------


def preview(
    file: Annotated[Path, typer.Argument(help="A file as `harli datasets upload` takes it.")],
    column: Annotated[list[str] | None, typer.Option(metavar="ROLE=COLUMN", help="Where a role's text stands.")] = None,
    json: AsJson = False,
) -> None:
    """Show how a file would be read, and send none of it to be stored. Exit status 1 when it would not be."""
    from core import printing

    with connected() as client:
        found = client.preview_dataset(file, columns=dict(pair(text) for text in column or []))
    if json:
        printing.as_json(found)
    else:
        mapping = ", ".join(f"{role}: {name}" for role, name in found.mapping.items())
        printing.facts([("file", found.container), ("format", found.format or "not known"), ("columns", mapping)])
        columns: list[printing.Column[schemas.DatasetColumn]] = [
            ("COLUMN", lambda one: one.name), ("KIND", lambda one: one.kind), ("EXAMPLE", lambda one: one.example),
        ]  # fmt: skip
        printing.table(found.columns, columns, "It has no columns.")
        for fault in found.faults:
            printing.say(f"[red]fault[/] {printing.escape(fault)}")
        looked_at = f"{found.looked_at:,} rows" if found.whole else f"the first {found.looked_at:,} rows"
        for finding in found.findings:
            examples = f" ({'; '.join(finding.examples)})" if finding.examples else ""
            what = printing.escape(finding.message + examples)
            printing.say(f"[yellow]remark[/] of {looked_at} {finding.count:,}: {what}")
        if found.languages:
            spoken = ", ".join(f"{language} {count:,}" for language, count in found.languages.items())
            printing.say(f"{looked_at[0].upper()}{looked_at[1:]} by language: {spoken}")
        if found.longest_row_tokens is not None:
            printing.say(f"The longest of {looked_at} has {found.longest_row_tokens:,} tokens.")
        if found.format is None:
            printing.say(f"Say which column is what: --column ROLE=COLUMN, of the roles {', '.join(found.roles)}.")
    if found.format is None or found.faults:
        raise typer.Exit(1)


def rows(
    name: Named,
    offset: Annotated[int, typer.Option(min=0)] = 0,
    limit: Annotated[int, typer.Option(min=1, max=50)] = 5,
    rendered: Annotated[bool, typer.Option("--rendered", help="As the model sees them.")] = False,
    json: AsJson = False,
) -> None:
    """Show rows of a data set."""
    from core import printing

    with connected() as client:
        if rendered:
            seen = client.dataset_rendered(name, offset, limit)
            if json:
                printing.as_json(seen)
            for row in [] if json else seen:
                print(f"--- row {row.index}")
                print(plain(marked(row)))
            return
        found = client.dataset_rows(name, offset, limit)
    if json:
        printing.as_json(found)
        return
    for stored in found:
        print(f"--- row {stored.index}")
        for message in stored.messages:
            calls = f" {message.tool_calls}" if message.tool_calls else ""
            print(plain(f"{message.role}: {message.content}{calls}"))


def marked(row: schemas.RenderedRow) -> str:
    """The row's text with the runs that the loss counts between 【 and 】."""
    text, inside = "", False
    for token in row.tokens:
        if token.trained != inside:
            text += "】" if inside else "【"
            inside = token.trained
        text += token.text
    return text + "】" * inside


# ---- adapters --------------------------------------------------------------------------------------------------------


def _show(adapter: schemas.Adapter, json: bool) -> None:
    from core import printing

    if json:
        printing.as_json(adapter)
    else:
        printing.adapter_facts(adapter)


def show(name: Named, json: AsJson = False) -> None:
    """Show an adapter: its versions, where they come from, its aliases."""

    with connected() as client:
        _show(client.adapter(name), json)


def promote(name: Named, alias: Alias, version: Version = None, json: AsJson = False) -> None:
    """Let NAME@ALIAS stand for a version; the engine serves it under that name."""

    with connected() as client:
        _show(client.promote_adapter(name, alias, version), json)


def rollback(name: Named, alias: Alias, json: AsJson = False) -> None:
    """Let NAME@ALIAS stand for the version that it was before."""

    with connected() as client:
        _show(client.roll_back_adapter(name, alias), json)


def unalias(name: Named, alias: Alias) -> None:
    """Take NAME@ALIAS away; the version stays."""

    with connected() as client:
        client.delete_alias(name, alias)


def merge(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the sum is called.")],
    parts: Annotated[list[str], typer.Argument(metavar="ADAPTER[=WEIGHT]...", help="tone@2=1.0 facts@prod=0.5")],
    new_version: Annotated[bool, typer.Option("--new-version", help="Add a version to a name that exists.")] = False,
    json: AsJson = False,
) -> None:
    """Add adapters up to a new one."""

    weights = dict(_weighted(part) for part in parts)
    with connected() as client:
        _show(client.merge_adapters(name, weights, new_version=new_version), json)


def _weighted(text: str) -> tuple[str, float]:
    name, equals, weight = text.partition("=")
    try:
        return name, float(weight) if equals else 1.0
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not ADAPTER or ADAPTER=WEIGHT, as in tone@2=0.5") from None


def export(
    name: Named,
    destination: Annotated[Path, typer.Option("--to", help="A file, or a folder to put it in.")] = Path(),
    version: Version = None,
) -> None:
    """Save the adapter's base model with the adapter merged into it, as a tar of its folder."""
    from rich.progress import Progress

    from core import printing

    with connected() as client:
        begun = client.export_merged(name, version)
        with Progress(console=printing.err, transient=True, disable=not printing.err.is_terminal) as bar:
            task = bar.add_task("merging", total=None)
            try:
                client.wait_operation(begun.id, lambda now: bar.update(task, completed=now.done, total=now.total))
            except KeyboardInterrupt:
                client.cancel_operation(begun.id)
                raise
        print(client.download_merged(begun.id, destination))
