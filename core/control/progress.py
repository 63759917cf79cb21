"""What an engine's reports, and its end, do to a job: functions on the row, in the caller's write transaction."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy.orm import Session

from core.api import schemas
from core.control import quotas
from core.control.jobs import save_from_checkpoint
from core.control.lifecycle import remark, transition
from core.link.messages import JobUpdate
from db import changes, samples
from db import jobs as rows
from db.jobs import JobRecord

# The code of a job that an engine did not take because it still holds another.
ENGINE_BUSY = "engine_busy"


def apply(session: Session, job: JobRecord, update: JobUpdate) -> None:
    """What an update that is not stale does to its job."""
    time_ = datetime.fromtimestamp(update.time, UTC)
    if job.state == "interrupted" and update.kind != "interrupted":
        adopt(session, job)
    if update.kind in ("checkpoint", "evaluated", "stopped_early"):
        _noted(session, job, update)
        return
    match update.kind:
        case "started" | "resumed":
            _started(session, job, update, time_)
        case "metric":
            _metric(session, job, update, time_)
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


def _metric(session: Session, job: JobRecord, update: JobUpdate, time_: datetime) -> None:
    if update.tokens is not None:
        # Asks the store, which would write what is changed before that; so it is first.
        quotas.count_tokens(session, job, update.tokens, time_)
        job.tokens = update.tokens
    names = ("loss", "eval_loss", "learning_rate", "grad_norm", "tokens")
    values: dict[str, Any] = {name: getattr(update, name) for name in names}
    rows.put_metric(session, job.id, update.step, time_, values)
    job.step = max(job.step, update.step)
    if update.loss is not None:
        job.loss = update.loss
        job.first_loss = update.loss if job.first_loss is None or update.step <= 1 else job.first_loss
    if update.eval_loss is not None:
        job.eval_loss, job.best_step, job.best_loss = update.eval_loss, update.best_step, update.best_loss
    job.epoch = update.epoch if update.epoch is not None else job.epoch
    session.add(rows.JobLogRecord(job_id=job.id, time=time_, message=_log_line(job, update)))
    figures = {"state": job.state, "step": update.step, "loss": update.loss}
    changes.add(session, "jobs", "metric", job.id, tenant=job.tenant, **figures)


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


def _log_line(job: JobRecord, update: JobUpdate) -> str:
    """What a step measured, in words."""
    figures = {
        "loss": (update.loss, ".4f"),
        "evaluation loss": (update.eval_loss, ".4f"),
        "learning rate": (update.learning_rate, ".3g"),
        "gradient norm": (update.grad_norm, ".3g"),
        "tokens": (update.tokens, ",d"),
    }
    shown = ", ".join(f"{name} {value:{form}}" for name, (value, form) in figures.items() if value is not None)
    of_total = f" of {job.total_steps}" if job.total_steps is not None else ""
    return f"step {update.step}{of_total}: {shown}"
