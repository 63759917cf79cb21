"""The Targets page as a document that stands still: one HTML file with charts, which needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, tzinfo
from html import escape
from typing import Any

from core.api.schemas import Frontier, Notice, Targets, TelemetryPoint

_STYLE = """body{font:15px system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem;color:#1d2433}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .6rem;text-align:left;border-bottom:1px solid #ddd}caption{text-align:left;font-weight:600}"""


def html(
    targets: Targets,
    found: Frontier | None,
    points: Sequence[TelemetryPoint],
    notices: Sequence[Notice],
    at: datetime,
    zone: tzinfo,
) -> str:
    """Targets in force, the frontier at the present load, the past hour, and what the guard did; times in `zone`."""
    figures = [_past(points, zone)] if points else []
    if found is not None and found.points:
        figures.insert(0, _frontier(found))
    drawn = "".join(
        figure.to_html(full_html=False, include_plotlyjs="inline" if number == 0 else False)
        for number, figure in enumerate(figures)
    )
    missing = f"<p>{escape(found.missing)}</p>" if found is not None and found.missing else ""
    title = f"Latency targets and finetuning, {at.astimezone(zone):%Y-%m-%d %H:%M %Z}"
    force = _table(
        "In force",
        ("target", "of", "why"),
        [
            (f"{one.kind.upper()} p{one.quantile * 100:g} ≤ {one.ms:g} ms", one.tenant or "everyone", one.reason)
            for one in targets.in_force
        ],
    )
    told = _table(
        "Guard and schedule",
        ("when", "what", "why"),
        [(f"{one.time.astimezone(zone):%Y-%m-%d %H:%M:%S}", one.code, one.message) for one in notices],
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
        f"<h1>{escape(title)}</h1>{force}{missing}{drawn}{told}</html>"
    )


def _table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    none = "" if rows else f'<tr><td colspan="{len(head)}">none</td></tr>'
    top = f"<caption>{escape(caption)}</caption><thead><tr>{cells}</tr></thead>"
    return f"<table>{top}<tbody>{body}{none}</tbody></table>"


def _frontier(found: Frontier) -> Any:
    import plotly.graph_objects as go  # type: ignore[import-untyped]

    figure = go.Figure()
    figure.add_scatter(
        x=[point.target_ms for point in found.points],
        y=[point.finetune_tokens_s for point in found.points],
        customdata=[[100 * point.attainment, point.itl_p99_ms] for point in found.points],
        hovertemplate="%{x:g} ms: %{y:,.0f} tokens/s, ITL p99 %{customdata[1]:.1f} ms, %{customdata[0]:.2f} % attained",
        mode="lines+markers",
        name="simulated",
    )
    if found.now is not None:
        x, y = [found.now.target_ms], [found.now.finetune_tokens_s]
        figure.add_scatter(x=x, y=y, mode="markers", name="in force", marker={"size": 13})
    figure.update_layout(
        title=f"What a target gives: {found.policy}, {found.batch} requests, {found.kv_tokens:,} KV tokens",
        xaxis_title="ITL target (ms)", yaxis_title="finetune tokens/s", template="simple_white",
    )  # fmt: skip
    return figure


def _past(points: Sequence[TelemetryPoint], zone: tzinfo) -> Any:
    from plotly.subplots import make_subplots  # type: ignore[import-untyped]

    figure = make_subplots(specs=[[{"secondary_y": True}]])
    times = [point.time.astimezone(zone) for point in points]
    lines = [
        ("ITL p99 (ms)", [point.itl_p99_ms for point in points], False, {}),
        ("target (ms)", [point.target_ms for point in points], False, {"dash": "dash"}),
        ("finetune tokens/s", [point.finetune_tokens_s for point in points], True, {}),
    ]
    for name, values, second, line in lines:
        figure.add_scatter(x=times, y=values, name=name, line=line, secondary_y=second)
    figure.update_layout(title="The past hour", template="simple_white")
    figure.update_yaxes(title_text="ms", secondary_y=False)
    figure.update_yaxes(title_text="tokens/s", secondary_y=True)
    return figure
