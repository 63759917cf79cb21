"""`harli alerts`, for `core.cli` to mount."""

from __future__ import annotations

from typing import Annotated, Any, get_args

import typer

from core.cli_shared import AsJson, connected

alerts = typer.Typer(invoke_without_command=True)


@alerts.callback()
def alerts_group(ctx: typer.Context, json: AsJson = False) -> None:
    """Alerts on attainment, queue and engine; without a command, list those that are open."""
    if ctx.invoked_subcommand is None:
        alerts_list(json=json)


@alerts.command("list")
def alerts_list(
    all_: Annotated[bool, typer.Option("--all", help="Those that are over too.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, max=500, help="How many, newest first.")] = 50,
    json: AsJson = False,
) -> None:
    """List alerts, newest first."""
    from core import printing

    with connected() as client:
        items = client.alerts(limit=limit).items
    shown = [alert for alert in items if all_ or alert.state != "resolved"]
    printing.listing(shown, printing.ALERT_COLUMNS, "No alerts.", json)


@alerts.command("rules")
def alerts_rules(json: AsJson = False) -> None:
    """List the rules."""
    from core import printing

    with connected() as client:
        found = list(client.alert_rules())
    printing.listing(found, printing.ALERT_RULE_COLUMNS, "No rules; make one with `harli alerts set`.", json)


@alerts.command("set")
def alerts_set(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    metric: Annotated[str, typer.Argument(metavar="FIGURE", help="attainment, itl_p99_ms, longest_wait_s ...")],
    comparison: Annotated[str, typer.Argument(metavar="above|below")],
    threshold: Annotated[float, typer.Argument(metavar="VALUE")],
    window: Annotated[float | None, typer.Option("--window", help="Seconds that the figure is of.")] = None,
    hold: Annotated[float | None, typer.Option("--for", help="Seconds that it must hold before it fires.")] = None,
    severity: Annotated[str | None, typer.Option(help="info, warning or critical.")] = None,
    enabled: Annotated[bool | None, typer.Option("--on/--off")] = None,
    json: AsJson = False,
) -> None:
    """Make a rule or replace it, e.g. `harli alerts set slow itl_p99_ms above 80 --for 120`."""
    from core import printing
    from core.api.schemas import AlertMetric

    if metric not in get_args(AlertMetric):
        raise typer.BadParameter(f"{metric!r} is none of {', '.join(get_args(AlertMetric))}", param_hint="FIGURE")
    given = {"window_s": window, "for_s": hold, "severity": severity, "enabled": enabled}
    fields: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    with connected() as client:
        rule = client.set_alert_rule(name, metric=metric, comparison=comparison, threshold=threshold, **fields)
    if json:
        printing.as_json(rule)
    else:
        printing.table([rule], printing.ALERT_RULE_COLUMNS, "")


@alerts.command("delete")
def alerts_delete(name: Annotated[str, typer.Argument(metavar="NAME")]) -> None:
    """Delete a rule."""

    with connected() as client:
        client.delete_alert_rule(name)
