"""Jobs side by side: their losses in one chart, what they were asked with differently, and what came of it."""

from __future__ import annotations

import streamlit as st

from app.ui import charts
from app.ui.data import client
from app.ui.page import reading, teach
from app.ui.table import Cell, Column, Row, table
from app.ui.text import number
from app.ui.theme import colours
from core.api.job_schemas import MOST_COMPARED, JobComparison
from core.api.schemas import Job

_OFFERED = 200


def draw() -> None:
    with reading("the jobs"):
        jobs = [job for job in client().jobs(limit=_OFFERED).items if job.step]
    if len(jobs) < 2:
        teach(
            "Nothing to compare yet",
            "Two jobs that have trained a step can be laid side by side: clone one, change a setting, and run both.",
            "harli compare JOB JOB",
            "curl '{api}/api/jobs/compare?job_id=JOB&job_id=JOB'",
        )
        return
    names = {job.id: f"{job.name} · {job.id}" for job in jobs}
    chosen = st.multiselect(
        "Jobs", list(names), format_func=lambda job_id: names.get(job_id, job_id), key="compared",
        max_selections=MOST_COMPARED,
        placeholder="Choose two or more", bind="query-params",
    )  # fmt: skip
    if len(chosen) < 2:
        st.caption(
            "Their losses then stand here side by side, with the settings in which they differ and what came of each."
        )
        return
    with reading("the jobs' figures"):
        found = client().compare_jobs(chosen)
    _charts(found)
    _facts(found)


def _charts(found: JobComparison) -> None:
    lines = [(_label(job), found.metrics[job.id]) for job in found.jobs]
    left, right = st.columns(2, gap="medium")
    with left:
        charts.chart("Training loss", charts.losses(lines, colours(), held_out=False), key="losses", height=300)
    with right:
        charts.chart("Evaluation loss", charts.losses(lines, colours(), held_out=True), key="eval_losses", height=300)


def _facts(found: JobComparison) -> None:
    columns = [Column(""), *(Column(_label(job), end=True) for job in found.jobs)]
    rows = [
        Row(name, (Cell(name), *(Cell(_shown(value)) for value in values))) for name, values in found.differing.items()
    ]
    for label, values in outcome(found.jobs).items():
        rows.append(Row(f"outcome {label}", (Cell(label), *(Cell(value) for value in values))))
    table(columns, rows, key="compared_facts", openable=False)


def outcome(jobs: list[Job]) -> dict[str, list[str]]:
    """What came of each, a row a figure."""
    return {
        "state": [job.state for job in jobs],
        "steps": [number(job.step) for job in jobs],
        "tokens": [number(job.tokens) for job in jobs],
        "loss": [number(job.loss, 4) for job in jobs],
        "lowest evaluation loss": [number(job.best_loss, 4) for job in jobs],
        "at step": [number(job.best_step) for job in jobs],
    }


def _label(job: Job) -> str:
    return f"{job.adapter_name} {job.id[-4:]}"


def _shown(value: object) -> str:
    if value is None:
        return "–"
    return (
        f"{value:g}"
        if isinstance(value, float)
        else ", ".join(map(str, value))
        if isinstance(value, list)
        else str(value)
    )
