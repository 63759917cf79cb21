"""A simulation as a web page that needs nothing else: table, frontier, and what one run did over time."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]
from plotly.subplots import make_subplots  # type: ignore[import-untyped]

from core.simulate.command import Report, Row
from core.simulate.outcome import Outcome, weighted_quantile

COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("policy", lambda row: row.policy),
    ("target", lambda row: f"{row.target_ms:g}"),
    ("ITL 50/99", lambda row: _pair(row.summary.itl_p50_ms, row.summary.itl_p99_ms)),
    ("TPOT 50/99", lambda row: _pair(row.summary.tpot_p50_ms, row.summary.tpot_p99_ms)),
    ("TTFT 50/99", lambda row: _pair(row.summary.ttft_p50_ms, row.summary.ttft_p99_ms)),
    ("attained", lambda row: f"{100 * row.summary.attainment:.2f}%"),
    ("over", lambda row: f"{100 * row.summary.steps_over:.2f}%"),
    ("tokens/s", lambda row: f"{row.summary.finetune_tokens_s:,.0f}"),
    ("excl.", lambda row: f"{100 * row.summary.exclusive_share:.1f}%"),
)
_BIN_MS = 1000.0
_SYMBOLS = {True: "circle", False: "circle-open"}
_STYLE = """body{font:15px system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .6rem;text-align:right;border-bottom:1px solid #ddd}
th:first-child,td:first-child{text-align:left}"""


def page(report: Report, timeline: Outcome, shown: Row) -> str:
    """The report as HTML. timeline: the run of the row `shown`."""
    head = "".join(f"<th>{escape(name)}</th>" for name, _ in columns(report))
    cells = [[escape(value(row)) for _, value in columns(report)] for row in report.rows]
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in cells)
    notes = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    figures = [frontier(report), over_time(timeline, shown)]
    drawn = [
        figure.to_html(full_html=False, include_plotlyjs="inline" if number == 0 else False)
        for number, figure in enumerate(figures)
    ]
    title = f"{report.trace} on {report.device}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
        f"<h1>{escape(title)}</h1><p>{escape(report.model)}, {report.requests:,} requests in {report.seconds:,.0f} s, "
        f"prefill {report.prefill}, {report.target_kind} targets, seed {report.seed}. Latencies in ms.</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><ul>{notes}</ul>{''.join(drawn)}</html>"
    )


def frontier(report: Report) -> go.Figure:
    """Finetune throughput against the target, a line per policy; hollow where the target was not attained."""
    figure = go.Figure()
    for name in dict.fromkeys(row.policy for row in report.rows):
        rows = sorted((row for row in report.rows if row.policy == name), key=lambda row: row.target_ms)
        figure.add_scatter(
            x=[row.target_ms for row in rows],
            y=[row.summary.finetune_tokens_s for row in rows],
            name=name,
            mode="lines+markers",
            marker={"symbol": [_SYMBOLS[row.summary.attainment >= 0.99] for row in rows], "size": 9},
            customdata=[[100 * row.summary.attainment] for row in rows],
            hovertemplate="%{x:g} ms: %{y:,.0f} tokens/s, %{customdata[0]:.2f} % attained",
        )
    figure.update_layout(
        title="Frontier (hollow: under 99 % attained)", xaxis_title="target (ms)", yaxis_title="finetune tokens/s",
        template="simple_white",
    )  # fmt: skip
    return figure


def over_time(outcome: Outcome, row: Row) -> go.Figure:
    """Gaps, batch, layouts and tasklets of one run, second by second."""
    steps = outcome.steps
    end, gap, batch = np.array(steps.end_ms), np.array(steps.gap_ms), np.array(steps.batch, dtype=float)
    bins = (end // _BIN_MS).astype(int)
    seconds = np.unique(bins)
    layouts = [str(layout) for layout in steps.layout]
    figure = make_subplots(
        rows=4, cols=1, shared_xaxes=True, vertical_spacing=0.04,
        subplot_titles=("gap (ms)", "running requests", "share of steps per layout", "tasklets a second"),
    )  # fmt: skip
    chosen = [bins == second for second in seconds]
    for quantile, name in ((0.5, "p50"), (0.99, "p99")):
        values = [weighted_quantile(gap[at], batch[at], quantile) for at in chosen]
        figure.add_scatter(x=seconds, y=values, name=f"gap {name}", row=1, col=1)
    figure.add_hline(y=row.target_ms, line_dash="dot", row=1, col=1)
    figure.add_scatter(x=seconds, y=[batch[at].mean() for at in chosen], name="running", row=2, col=1)
    names = np.array(layouts)
    for name in sorted(set(layouts)):
        shares = [float((names[at] == name).mean()) for at in chosen]
        figure.add_bar(x=seconds, y=shares, name=name, row=3, col=1)
    for name, counts in (("beside", steps.beside), ("after", steps.after)):
        figure.add_scatter(x=seconds, y=[np.array(counts)[at].sum() for at in chosen], name=name, row=4, col=1)
    figure.update_layout(
        title=f"{row.policy} at {row.target_ms:g} ms", barmode="stack", height=900, template="simple_white"
    )
    figure.update_xaxes(title_text="s", row=4, col=1)
    return figure


def columns(report: Report) -> tuple[tuple[str, Callable[[Row], str]], ...]:
    """Headings and cells of the report's table: latencies at p50/p99 in ms, gaps attained, steps over what they were
    allowed, finetune tokens/s and their share of what the device does without decode."""
    return tuple(column for column in COLUMNS if report.prefill == "here" or not column[0].startswith("TTFT"))


def _pair(p50: float | None, p99: float | None) -> str:
    return "–" if p50 is None or p99 is None else f"{p50:.1f}/{p99:.1f}"
