"""What the command line prints: JSON for programs, tables for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic_core import to_jsonable_python
from rich import markup
from rich.console import Console
from rich.table import Table

from core.api import schemas
from core.cli_shared import plain
from core.target_text import window_text

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
Column = tuple[str, Callable[[T], object]]

# What goes into a pipe or a file is not folded to the width of a terminal that is not there.
_PIPE_WIDTH = 250
out = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
err = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else _PIPE_WIDTH)


def as_json(value: BaseModel | Sequence[BaseModel] | dict[str, Any]) -> None:
    """One JSON document on standard output, whatever the terminal is."""
    print(json.dumps(to_jsonable_python(value), indent=2, ensure_ascii=False))


def escape(text: str) -> str:
    """Text that others wrote, as `say` prints it: no markup, and nothing that a terminal obeys."""
    return markup.escape(plain(text))


def say(text: str) -> None:
    """A sentence for people, not broken into lines. Rich reads markup in it: `escape` what comes from elsewhere."""
    out.print(text, soft_wrap=True)


def table(rows: Sequence[T], columns: Sequence[Column[T]], empty: str) -> None:
    """The rows under their headings, or the sentence `empty`."""
    if not rows:
        out.print(empty)
        return
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for number, (heading, _) in enumerate(columns):
        grid.add_column(heading, overflow="fold", no_wrap=number == 0)
    for row in rows:
        grid.add_row(*(_cell(value(row)) for _, value in columns))
    out.print(grid)


def listing(rows: Sequence[M], columns: Sequence[Column[M]], empty: str, json: bool) -> None:
    """The rows for programs, or as a table."""
    if json:
        as_json(rows)
    else:
        table(rows, columns, empty)


def facts(pairs: Sequence[tuple[str, object]]) -> None:
    """One fact a line; those that are None are left out."""
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        if value is not None:
            say(f"[bold]{name:{width}}[/]  {_cell(value)}")


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, datetime):
        return age(value)
    return escape(", ".join(map(str, value)) if isinstance(value, list) else str(value))


def age(moment: datetime) -> str:
    """How long ago `moment` was, in its largest unit."""
    seconds = (datetime.now(UTC) - moment).total_seconds()
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"


def size(count: int) -> str:
    """Bytes in the largest binary unit that leaves a number above one."""
    number = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError("the last unit takes every number")


def steps(job: schemas.Job) -> str:
    """``step/total`` of a job."""
    return f"{job.step}/{job.total_steps}" if job.total_steps else str(job.step)


JOB_COLUMNS: Sequence[Column[schemas.Job]] = (
    ("ID", lambda job: job.id),
    ("NAME", lambda job: job.name),
    ("STATE", lambda job: job.state),
    ("STEP", steps),
    ("LOSS", lambda job: job.loss),
    ("DATA SET", lambda job: job.dataset_name),
    ("ADAPTER", lambda job: job.adapter_name),
    ("CREATED", lambda job: job.created_at),
)
DATASET_COLUMNS: Sequence[Column[schemas.Dataset]] = (
    ("NAME", lambda dataset: dataset.name),
    ("VERSION", lambda dataset: dataset.version),
    ("ROWS", lambda dataset: dataset.report.rows),
    ("TOKENS", lambda dataset: dataset.report.tokens),
    ("SIZE", lambda dataset: size(dataset.bytes)),
    ("CREATED", lambda dataset: dataset.created_at),
    ("ID", lambda dataset: dataset.id),
)
ADAPTER_COLUMNS: Sequence[Column[schemas.Adapter]] = (
    ("NAME", lambda adapter: adapter.name),
    ("VERSIONS", lambda adapter: len(adapter.versions)),
    ("DEPLOYED", lambda adapter: adapter.deployed_version),
    ("STATE", lambda adapter: adapter.deployment),
    ("CREATED", lambda adapter: adapter.created_at),
)
TARGET_COLUMNS: Sequence[Column[schemas.TargetBody]] = (
    ("KIND", lambda target: target.kind),
    ("QUANTILE", lambda target: f"p{target.quantile * 100:g}"),
    ("MS", lambda target: target.ms),
    ("TENANT", lambda target: target.tenant or "everyone"),
    ("WHEN", lambda target: "; ".join(window_text(window) for window in target.windows) or "always"),
)
IN_FORCE_COLUMNS: Sequence[Column[schemas.TargetInForce]] = (
    ("KIND", lambda target: target.kind),
    ("QUANTILE", lambda target: f"p{target.quantile * 100:g}"),
    ("MS", lambda target: target.ms),
    ("TENANT", lambda target: target.tenant or "everyone"),
    ("WHY", lambda target: target.reason),
    ("UNTIL", lambda target: f"{target.until:%a %H:%M} UTC" if target.until else None),
)
FRONTIER_COLUMNS: Sequence[Column[schemas.FrontierPoint]] = (
    ("TARGET MS", lambda point: point.target_ms),
    ("FINETUNE TOKENS/S", lambda point: point.finetune_tokens_s),
    ("OF EXCLUSIVE", lambda point: f"{point.exclusive_share * 100:.1f} %"),
    ("ITL P50", lambda point: point.itl_p50_ms),
    ("ITL P99", lambda point: point.itl_p99_ms),
    ("ATTAINED", lambda point: f"{point.attainment * 100:.2f} %"),
    ("LAYOUT", lambda point: point.layout),
)
NOTICE_COLUMNS: Sequence[Column[schemas.Notice]] = (
    ("WHEN", lambda notice: notice.time),
    ("LEVEL", lambda notice: notice.level),
    ("CODE", lambda notice: notice.code),
    ("WHAT", lambda notice: notice.message),
)
ALERT_COLUMNS: Sequence[Column[schemas.Alert]] = (
    ("RULE", lambda alert: alert.rule),
    ("SEVERITY", lambda alert: alert.severity),
    ("STATE", lambda alert: alert.state),
    ("SINCE", lambda alert: alert.began_at),
    ("WHAT", lambda alert: alert.message),
)
ALERT_RULE_COLUMNS: Sequence[Column[schemas.AlertRule]] = (
    ("NAME", lambda rule: rule.name),
    ("FIGURE", lambda rule: rule.metric),
    ("IS", lambda rule: f"{rule.comparison} {rule.threshold:g}"),
    ("OF S", lambda rule: rule.window_s),
    ("FOR S", lambda rule: rule.for_s),
    ("SEVERITY", lambda rule: rule.severity),
    ("ON", lambda rule: "yes" if rule.enabled else "no"),
)


def job_facts(job: schemas.Job) -> None:
    """A job in full."""
    facts(
        [
            ("id", job.id),
            ("name", job.name),
            ("state", job.state),
            ("waiting for", job.waiting_reason),
            ("step", steps(job)),
            ("loss", job.loss),
            ("first loss", job.first_loss),
            ("evaluation", job.eval_loss),
            ("lowest", f"{job.best_loss:.4g} at step {job.best_step}" if job.best_loss is not None else None),
            ("tokens", f"{job.tokens:,} of about {job.expected_tokens:,}" if job.expected_tokens else job.tokens),
            ("data set", job.dataset_name),
            ("adapter", f"{job.adapter_name}@{job.adapter_version}" if job.adapter_version else job.adapter_name),
            ("base", job.spec.base_model),
            ("priority", job.priority),
            ("deadline", f"{job.deadline:%Y-%m-%d %H:%M} UTC" if job.deadline else None),
            ("resumes", job.resumes),
            ("created", job.created_at),
            ("started", job.started_at),
            ("ended", job.ended_at),
            ("error", f"{job.error.message} [{job.error.code}]" if job.error else None),
        ]
    )


def dataset_facts(dataset: schemas.Dataset) -> None:
    """A data set with its report."""
    report = dataset.report
    facts(
        [
            ("id", dataset.id),
            ("name", f"{dataset.name}, version {dataset.version}"),
            ("format", report.format),
            ("columns", ", ".join(f"{role}: {column}" for role, column in report.columns.items()) or None),
            ("rows", f"{report.rows} of {report.rows_read} read"),
            ("tokens", report.tokens),
            ("answer tokens", report.answer_tokens),
            ("longest row", report.longest_row_tokens),
            ("size", size(dataset.bytes)),
            ("created", dataset.created_at),
        ]
    )
    for finding in report.findings:
        style = "red" if finding.level == "error" else "yellow"
        say(f"[{style}]{finding.level}[/] {finding.count} × {_cell(finding.message)}")
        for example in finding.examples:
            say(f"    {_cell(example)}")


def _before(history: Sequence[int]) -> str:
    return f", before that {', '.join(map(str, reversed(history)))}" if history else ""


def adapter_facts(adapter: schemas.Adapter) -> None:
    """An adapter with its versions."""
    facts(
        [
            ("name", adapter.name),
            ("deployed", adapter.deployed_version),
            ("wanted", adapter.wanted_version),
            ("state", adapter.deployment),
            ("error", f"{adapter.error.message} [{adapter.error.code}]" if adapter.error else None),
            *(
                (alias.address, f"version {alias.wanted_version}, {alias.deployment}" + _before(alias.history))
                for alias in adapter.aliases
            ),
        ]
    )
    columns: Sequence[Column[schemas.AdapterVersion]] = (
        ("VERSION", lambda version: version.version),
        ("ORIGIN", lambda version: version.origin),
        ("RANK", lambda version: version.rank),
        ("ALPHA", lambda version: version.alpha),
        ("SIZE", lambda version: size(version.bytes)),
        ("BASE", lambda version: version.base),
        ("JOB", lambda version: version.job_id),
        ("MADE OF", lambda version: ", ".join(version.parents or ()) or version.dataset),
        ("CREATED", lambda version: version.created_at),
    )
    table(adapter.versions, columns, "It has no versions.")
