"""What an engine's reports, and its end, do to a job: functions on the row, in the caller's write transaction.

Metrics come many times a second, so that they go by `measured`, several at a time and without the row as an object."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, date, datetime
from typing import Any

from sqlalchemy import Row
from sqlalchemy.orm import Session

from core.api import schemas
from core.control.jobs import save_from_checkpoint
from core.control.lifecycle import remark, transition
from core.link.messages import JobUpdate
from db import changes, quotas, samples
from db import jobs as rows
from db.jobs import JobRecord

# The code of a job that an engine did not take because it still holds another.
ENGINE_BUSY = "engine_busy"


def apply(session: Session, job: JobRecord, update: JobUpdate) -> None:
    """What an update that is not stale, and no metric, does to its job."""
    time_ = datetime.fromtimestamp(update.time, UTC)
    if job.state == "interrupted" and update.kind != "interrupted":
        adopt(session, job)
    if update.kind in ("checkpoint", "evaluated", "stopped_early"):
        _noted(session, job, update)
        return
    match update.kind:
        case "started" | "resumed":
            _started(session, job, update, time_)
        case "log":
            session.add(rows.JobLogRecord(job_id=job.id, time=time_, message=update.message or ""))
            changes.add(session, "jobs", "log", job.id, tenant=job.tenant, state=job.state)
        case "saving":
            if job.state != "saving":
                transition(session, job, "saving", "saving", f"saving the adapter at step {update.step}")
        case "paused":
            _checkpointed(job, update)
            _settle(session, job, "paused", f"paused at step {update.step}")
        case "interrupted":
            _checkpointed(job, update)
            job.token = None
            interrupt(session, job, update.message or f"the engine stopped it at step {update.step}")
        case "cancelled":
            transition(session, job, "cancelled", "cancelled", f"stopped at step {job.step}")
        case "failed" if update.code == ENGINE_BUSY:
            interrupt(session, job, update.message or "the engine is busy", counts=False)
        case "failed":
            message = update.message or "the engine gave no reason"
            fail(session, job, update.code or "failed", message, update.param)


def _noted(session: Session, job: JobRecord, update: JobUpdate) -> None:
    """What leaves the job's state as it is."""
    if update.kind == "checkpoint":
        _checkpointed(job, update)
        remark(session, job, "checkpoint", f"checkpoint at step {update.step}")
    elif update.kind == "stopped_early":
        remark(session, job, "stopped_early", update.message or f"stopped early at step {update.step}")
    elif job.spec.get("sample_prompts"):
        job.sample_step, job.sample_path = update.step, update.path


def _started(session: Session, job: JobRecord, update: JobUpdate, time_: datetime) -> None:
    job.total_steps = update.total_steps or job.total_steps
    job.start_step = update.step
    if update.step < job.step:
        # What was done after the checkpoint is done again.
        job.step = update.step
        rows.drop_metrics_after(session, job.id, update.step)
        samples.drop_after(session, job.id, update.step)
    if job.state == "starting":
        again = f" from step {update.step}" if update.step else ""
        told = f": {update.message}" if update.message else ""
        transition(session, job, "running", "running", f"the engine runs it{again}{told}")
        if update.message:
            session.add(rows.JobLogRecord(job_id=job.id, time=time_, message=update.message))


def measured(session: Session, job: Row[*tuple[Any, ...]], updates: Sequence[JobUpdate]) -> None:
    """What metrics (at least one, in order, not stale) do to their job, which is a row of `rows.watched`."""
    state = job.state
    if state == "interrupted" and (record := rows.find(session, job.id)) is not None:
        adopt(session, record)
        session.flush()  # so that this is told first
        state = record.state
    figures = {name: getattr(job, name) for name in rows.FIGURES}
    trained: Counter[date] = Counter()
    times = [datetime.fromtimestamp(update.time, UTC) for update in updates]
    for update, time_ in zip(updates, times, strict=True):
        if update.tokens is not None:
            # What is done again after a crash counts once.
            if (fresh := update.tokens - figures["counted_tokens"]) > 0:
                trained[time_.date()] += fresh
                figures["counted_tokens"] = update.tokens
            figures["tokens"] = update.tokens
        figures["step"] = max(figures["step"], update.step)
        if update.loss is not None:
            figures["loss"] = update.loss
            if figures["first_loss"] is None or update.step <= 1:
                figures["first_loss"] = update.loss
        if update.eval_loss is not None:
            figures |= {"eval_loss": update.eval_loss, "best_step": update.best_step, "best_loss": update.best_loss}
        if update.epoch is not None:
            figures["epoch"] = update.epoch
    for day, tokens in trained.items():
        quotas.add(session, job.tenant, day, tokens)
    rows.put_metrics(
        session,
        job.id,
        [
            {"step": update.step, "time": time_, **{name: getattr(update, name) for name in rows.MEASURED}}
            for update, time_ in zip(updates, times, strict=True)
        ],
    )
    rows.put_figures(session, job.id, figures)
    rows.add_log(session, job.id, zip(times, (_log_line(job.total_steps, update) for update in updates), strict=True))
    told = [{"state": state, "step": update.step, "loss": update.loss} for update in updates]
    changes.add_many(session, "jobs", "metric", job.id, job.tenant, told)


def _checkpointed(job: JobRecord, update: JobUpdate) -> None:
    if update.path is None:
        return
    job.checkpoint, job.checkpoint_step = update.path, update.step
    if update.step > job.start_step:
        job.stalls = 0


def adopt(session: Session, job: JobRecord) -> None:
    """It was thought interrupted, and its engine works on it still."""
    transition(session, job, "running", "running", "the engine is back and never stopped working on it")


def interrupt(session: Session, job: JobRecord, why: str, *, counts: bool = True) -> None:
    """Its engine is gone or let go of it: resumable, unless something else was asked of it in the meantime. `counts`:
    towards giving up on a job that never gets anywhere."""
    if job.state != "interrupted":
        progress = (job.checkpoint_step or 0) > job.start_step
        job.stalls = 0 if progress else job.stalls + counts
        transition(session, job, "interrupted", "interrupted", why)
    _settle(session, job, None, why)


def _settle(session: Session, job: JobRecord, state: str | None, message: str) -> None:
    """Do what was asked of a job that the engine holds no longer; else put it in `state`."""
    asked = job.command
    if asked == "stop":
        transition(session, job, "cancelled", "cancelled", f"stopped at step {job.step}")
    elif asked == "save" and job.checkpoint_step:
        save_from_checkpoint(session, job)
    elif asked == "save":
        transition(session, job, "cancelled", "cancelled", "stopped; there was no checkpoint to save")
    elif asked == "pause" or state == "paused":
        transition(session, job, "paused", "paused", message)


def fail(session: Session, job: JobRecord, code: str, message: str, param: str | None) -> None:
    """End it with an error."""
    job.error = schemas.ErrorDetail(code=code, message=message, param=param).model_dump()
    transition(session, job, "failed", "failed", message)


def _log_line(total_steps: int | None, update: JobUpdate) -> str:
    """What a step measured, in words."""
    figures = {
        "loss": (update.loss, ".4f"),
        "evaluation loss": (update.eval_loss, ".4f"),
        "learning rate": (update.learning_rate, ".3g"),
        "gradient norm": (update.grad_norm, ".3g"),
        "tokens": (update.tokens, ",d"),
    }
    shown = ", ".join(f"{name} {value:{form}}" for name, (value, form) in figures.items() if value is not None)
    of_total = f" of {total_steps}" if total_steps is not None else ""
    return f"step {update.step}{of_total}: {shown}"
