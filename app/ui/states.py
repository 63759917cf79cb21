"""How the states of jobs, adapters and parts are shown, what can be done in each, and the codes of notices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from app.ui.table import Cell, Tone
from app.ui.text import span
from core.api.schemas import Job, JobMetric, JobState

_JOB_TONES: dict[JobState, Tone] = {
    "queued": "idle",
    "starting": "busy",
    "running": "busy",
    "paused": "warn",
    "saving": "busy",
    "succeeded": "good",
    "failed": "bad",
    "cancelled": "idle",
    "interrupted": "warn",
}
_BADGES: dict[Tone, str] = {"good": "green", "busy": "blue", "warn": "orange", "bad": "red", "idle": "gray"}
_RATE_STEPS = 30

PAUSABLE: frozenset[JobState] = frozenset({"queued", "starting", "running", "interrupted"})
RESUMABLE: frozenset[JobState] = frozenset({"paused", "interrupted"})
WAITING: frozenset[JobState] = frozenset({"queued", "interrupted"})
ENDED: frozenset[JobState] = frozenset({"succeeded", "failed", "cancelled"})


def job_tone(state: JobState) -> Tone:
    return _JOB_TONES[state]


def badge(text: str, tone: Tone) -> str:
    """A badge in Streamlit's Markdown."""
    return f":{_BADGES[tone]}-badge[{text}]"


def state_cell(job: Job) -> Cell:
    """State, with the reason of waiting or the error beneath."""
    note = job.error.message if job.error else job.waiting_reason or ""
    return Cell(job.state, note, job_tone(job.state))


def progress_cell(job: Job) -> Cell:
    """Steps done of all, with a bar."""
    if job.total_steps:
        return Cell(f"{job.step} / {job.total_steps}", share=job.step / job.total_steps)
    return Cell(str(job.step) if job.step else "–")


def seconds_per_step(metrics: Sequence[JobMetric]) -> float | None:
    """Mean time between the last steps; None before there are two."""
    last = [metric for metric in metrics if metric.loss is not None][-_RATE_STEPS:]
    if len(last) < 2 or last[-1].step == last[0].step:
        return None
    return (last[-1].time - last[0].time).total_seconds() / (last[-1].step - last[0].step)


def remaining(job: Job, metrics: Sequence[JobMetric]) -> str:
    """The time that the steps left will take at the present speed."""
    per_step = seconds_per_step(metrics)
    if job.state != "running" or per_step is None or not job.total_steps:
        return "–"
    return span((job.total_steps - job.step) * per_step)


MEMORY_CODES = ("memory_granted", "memory_reclaimed", "kv_grows", "kv_shrinks")
"""Notices that memory changed hands."""

PartState = Literal["starting", "ready", "backing_off", "stopped", "failed"]
PART_TONES: dict[PartState, Tone] = {
    "starting": "busy",
    "ready": "good",
    "backing_off": "warn",
    "stopped": "idle",
    "failed": "bad",
}
