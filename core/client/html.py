"""How a notebook shows the API's bodies: `_repr_html_` of each, still pictures of the moment they were asked for.

Colours are those of the page, so that they suit light and dark ones; every text is escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from html import escape
from typing import Any

from pydantic import BaseModel

from core.api import schemas

_STATES = {
    "running": "#2f81f7",
    "starting": "#2f81f7",
    "saving": "#2f81f7",
    "succeeded": "#2da44e",
    "deployed": "#2da44e",
    "ready": "#2da44e",
    "failed": "#cf222e",
    "lost": "#cf222e",
    "interrupted": "#bf8700",
    "paused": "#bf8700",
}
_SHOWN = 50
_HUES = (210, 30, 140, 280, 0, 60)
_DIM = "opacity:.65"
_WIDTH, _HEIGHT = 260, 44


# ---- pieces ----------------------------------------------------------------------------------------------------------


def text(value: object) -> str:
    """A value as people read it, escaped; a dash for none."""
    if value is None or value == "":
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S} UTC"
    return escape(str(value))


def badge(state: str) -> str:
    colour = _STATES.get(state, "currentColor")
    return (
        f'<span style="border:1px solid {colour};color:{colour};border-radius:1em;padding:0 .6em;font-size:85%">'
        f"{escape(state)}</span>"
    )


def bar(part: float) -> str:
    """A share from 0 to 1."""
    percent = 100 * min(max(part, 0.0), 1.0)
    return (
        '<div style="height:6px;width:260px;border-radius:3px;background:rgba(127,127,127,.25)">'
        f'<div style="height:6px;width:{percent:.1f}%;border-radius:3px;background:{_STATES["running"]}"></div></div>'
    )


def card(title: str, state: str | None, facts: Iterable[tuple[str, object]], more: str = "") -> str:
    """A title, a state, and what is known: facts that are None are left out."""
    rows = "".join(
        f'<tr style="background:none"><td style="text-align:left;padding:0 1em 0 0;{_DIM}">{escape(name)}</td>'
        f'<td style="text-align:left;padding:0">{text(value)}</td></tr>'
        for name, value in facts
        if value is not None and value != ""
    )
    head = f"<b>{escape(title)}</b> {badge(state) if state else ''}"
    return f'<div style="margin:.3em 0">{head}{more}<table style="margin:.3em 0">{rows}</table></div>'


def table(headings: Sequence[str], rows: Sequence[Sequence[object]], nothing: str) -> str:
    """The first rows, and how many there are."""
    if not rows:
        return f'<span style="{_DIM}">{escape(nothing)}</span>'
    head = "".join(f'<th style="text-align:left">{escape(heading)}</th>' for heading in headings)
    body = "".join(
        "<tr>" + "".join(f'<td style="text-align:left">{text(value)}</td>' for value in row) + "</tr>"
        for row in rows[:_SHOWN]
    )
    rest = f'<div style="{_DIM}">and {len(rows) - _SHOWN} more</div>' if len(rows) > _SHOWN else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{rest}"


def line(values: Sequence[float | None], label: str) -> str:
    """A small line chart with its range; gaps where there is no value."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    span, last = (high - low) or 1.0, max(len(values) - 1, 1)
    pieces: list[list[str]] = [[]]
    for number, value in enumerate(values):
        if value is None:
            pieces.append([])
        else:
            y = _HEIGHT - 2 - (_HEIGHT - 4) * (value - low) / span
            pieces[-1].append(f"{_WIDTH * number / last:.1f},{y:.1f}")
    drawn = "".join(
        f'<polyline points="{" ".join(points)}" fill="none" stroke="currentColor" stroke-width="1.5" '
        'stroke-linecap="round"/>'
        for points in pieces
        if points
    )
    return (
        f'<div style="display:inline-block;margin:0 1.5em .3em 0"><div style="font-size:85%;{_DIM}">{escape(label)}: '
        f"{known[-1]:.4g} (from {low:.4g} to {high:.4g})</div>"
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{escape(label)}">{drawn}</svg></div>'
    )


# ---- single bodies ---------------------------------------------------------------------------------------------------


def job(body: schemas.Job) -> str:
    of_total = f"{body.step} of {body.total_steps}" if body.total_steps else str(body.step)
    error = f"{body.error.message} [{body.error.code}]" if body.error else None
    version = f"@{body.adapter_version}" if body.adapter_version else ""
    return card(
        body.name,
        body.state,
        [
            ("job", body.id),
            ("step", of_total),
            ("loss", body.loss),
            ("first loss", body.first_loss),
            ("evaluation loss", body.eval_loss),
            ("tokens", f"{body.tokens:,}"),
            ("data set", body.dataset_name),
            ("adapter", f"{body.adapter_name}{version}"),
            ("waits because", body.waiting_reason),
            ("error", error),
        ],
        bar(body.step / body.total_steps) if body.total_steps else "",
    )


def dataset(body: schemas.Dataset) -> str:
    report = body.report
    findings = table(
        ["", "count", "finding", "first places"],
        [(found.level, found.count, found.message, "; ".join(found.examples[:3])) for found in report.findings],
        "nothing to remark",
    )
    facts = [
        ("data set", f"{body.id}, version {body.version}"),
        ("format", report.format),
        ("rows", f"{report.rows:,} of {report.rows_read:,} read"),
        ("tokens", f"{report.tokens:,}, {report.answer_tokens or 0:,} in answers" if report.tokens else None),
        ("longest row", f"{report.longest_row_tokens} tokens" if report.longest_row_tokens else None),
        ("uploaded", body.created_at),
    ]
    return card(body.name, None, facts) + findings


def adapter(body: schemas.Adapter) -> str:
    versions = table(
        ["version", "origin", "rank", "alpha", "bytes", "job", "created"],
        [(v.version, v.origin, v.rank, v.alpha, f"{v.bytes:,}", v.job_id, v.created_at) for v in body.versions],
        "no versions",
    )
    error = f"{body.error.message} [{body.error.code}]" if body.error else None
    return card(body.name, body.deployment, [("served version", body.deployed_version), ("error", error)]) + versions


def packed(body: schemas.PackedPreview) -> str:
    """Each colour is a row; what is underlined counts in the loss."""
    spans = "".join(
        f'<span style="background:hsl({_HUES[token.segment % len(_HUES)]} 80% 50% / 25%);'
        f'text-decoration:{"underline" if token.trained else "none"}">{escape(token.text)}</span>'
        for token in body.tokens
    )
    facts = [
        ("rows", body.segments),
        ("tokens", f"{body.micro_batch_tokens}, {body.trained_tokens} in the loss, {body.padding} of padding"),
        ("micro-batches of an epoch", body.micro_batches_per_epoch),
    ]
    text_ = f'<div style="font-family:monospace;white-space:pre-wrap;text-align:left">{spans}</div>'
    return card("Micro-batch", None, facts) + text_


def targets(body: schemas.Targets) -> str:
    facts = [(f"{target.kind} p{target.quantile * 100:g}", f"≤ {target.ms:g} ms") for target in body.targets]
    applied = "the engine plans with it" if body.applied_version == body.version else "not yet in force"
    return card("Targets", body.origin, [*facts, ("version", f"{body.version}, {applied}")])


def engine(body: schemas.Engine) -> str:
    return card(
        body.model or "Engine",
        body.state,
        [
            ("device", f"{body.device_name}, {body.dtype}" if body.device_name else None),
            ("KV cache", f"{body.kv_tokens:,} tokens" if body.kv_tokens else None),
            ("adapters", f"up to rank {body.max_lora_rank}" if body.max_lora_rank else None),
            ("ITL alone", f"{body.solo_itl_ms:.1f} ms" if body.solo_itl_ms else None),
            ("job", body.running_job),
            ("since", body.since),
        ],
    )


def live(body: schemas.Live) -> str:
    seen = body.window
    facts: list[tuple[str, object]] = [("window", f"{body.window_s:g} s")]
    if seen is not None:
        facts += [
            ("ITL p50 / p99", f"{text(seen.itl_p50_ms)} / {text(seen.itl_p99_ms)} ms"),
            ("attainment", f"{seen.attainment:.2%}" if seen.attainment is not None else None),
            ("decode", f"{seen.decode_tokens_s:.1f} tokens/s"),
            ("finetuning", f"{seen.finetune_tokens_s:.1f} tokens/s"),
            ("requests", f"{seen.running} running, {seen.waiting} waiting"),
            ("power", f"{seen.power_w:.0f} W" if seen.power_w is not None else None),
            ("finetuning stands still", seen.paused_reason),
        ]
    facts += [("jobs", ", ".join(f"{count} {state}" for state, count in body.jobs.items() if count) or None)]
    return card("Live", body.engine.state, facts) + targets(body.targets)


# ---- lists -----------------------------------------------------------------------------------------------------------

_COLUMNS: dict[type[BaseModel], dict[str, Callable[[Any], object]]] = {
    schemas.Job: {
        "job": lambda row: row.id,
        "name": lambda row: row.name,
        "state": lambda row: row.state,
        "step": lambda row: f"{row.step}/{row.total_steps}" if row.total_steps else row.step,
        "loss": lambda row: row.loss,
        "data set": lambda row: row.dataset_name,
        "adapter": lambda row: row.adapter_name,
        "created": lambda row: row.created_at,
    },
    schemas.Dataset: {
        "name": lambda row: row.name,
        "version": lambda row: row.version,
        "rows": lambda row: f"{row.report.rows:,}",
        "tokens": lambda row: row.report.tokens,
        "uploaded": lambda row: row.created_at,
        "id": lambda row: row.id,
    },
    schemas.Adapter: {
        "name": lambda row: row.name,
        "versions": lambda row: len(row.versions),
        "served": lambda row: row.deployed_version,
        "state": lambda row: row.deployment,
        "created": lambda row: row.created_at,
    },
    schemas.Part: {
        "part": lambda row: row.name,
        "state": lambda row: row.state,
        "address": lambda row: row.url,
        "restarts": lambda row: row.restarts,
        "message": lambda row: row.message,
    },
    schemas.JobEvent: {
        "time": lambda row: row.time,
        "what": lambda row: row.kind,
        "state": lambda row: row.to_state,
        "message": lambda row: row.message,
    },
    schemas.DatasetRow: {
        "row": lambda row: row.index,
        "chat": lambda row: " ┃ ".join(f"{message.role}: {message.content}" for message in row.messages),
    },
}
_LINES: dict[type[BaseModel], dict[str, str]] = {
    schemas.JobMetric: {"loss": "loss", "eval_loss": "evaluation loss", "learning_rate": "learning rate"},
    schemas.TelemetryPoint: {
        "itl_p50_ms": "ITL p50, ms",
        "itl_p99_ms": "ITL p99, ms",
        "decode_tokens_s": "decode, tokens/s",
        "finetune_tokens_s": "finetuning, tokens/s",
    },
}


def rows(bodies: Sequence[object], nothing: str = "empty") -> str:
    """A list of bodies of one kind: lines of what is measured, tables of what is named."""
    kind = type(bodies[0]) if bodies else None
    for known, fields in _LINES.items():
        if kind is not None and issubclass(kind, known):
            charts = [line([getattr(body, field) for body in bodies], label) for field, label in fields.items()]
            return f"<div>{''.join(charts)}</div>"
    for known, columns in _COLUMNS.items():
        if kind is not None and issubclass(kind, known):
            return table(list(columns), [[value(body) for value in columns.values()] for body in bodies], nothing)
    if kind is not None and issubclass(kind, BaseModel):
        names = list(kind.model_fields)
        return table(names, [[getattr(body, name) for name in names] for body in bodies], nothing)
    return table(["value"], [[body] for body in bodies], nothing)


def page(body: schemas.Page[Any]) -> str:
    more = f'<div style="{_DIM}">there are more: cursor={escape(repr(body.next))}</div>' if body.next else ""
    return rows(body.items) + more


def install() -> None:
    """Give the bodies their `_repr_html_`. Here, because the API itself has no use for pictures."""
    shown: dict[type[BaseModel], Callable[[Any], str]] = {
        schemas.Job: job,
        schemas.Dataset: dataset,
        schemas.PackedPreview: packed,
        schemas.Adapter: adapter,
        schemas.Targets: targets,
        schemas.Engine: engine,
        schemas.Live: live,
        schemas.Page: page,
    }
    for kind, picture in shown.items():
        setattr(kind, _HOOK, picture)


_HOOK = "_repr_html_"
