"""Fine-tuning jobs in OpenAI's terms: a file is a data set's version, a fine-tuned model an adapter."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Literal

from sqlalchemy.orm import Session

from core.api import schemas
from core.api.names import name_of
from core.api.openai_schemas import (
    CheckpointMetrics,
    FineTuningCheckpoint,
    FineTuningCreate,
    FineTuningEvent,
    FineTuningJob,
    Hyperparameters,
    Listed,
    Method,
    OpenAIError,
    Supervised,
    listed,
)
from core.control import bases, datasets, engines, jobs, outlook, pages
from core.control.context import Control
from core.control.openai_files import RESULTS
from core.errors import HarliError, Invalid, NotFound, Unavailable
from db import adapters as adapter_rows
from db import jobs as job_rows
from db import openai as rows
from db.jobs import TERMINAL, JobEventRecord, JobMetricRecord, JobRecord

LEARNING_RATE: float = schemas.JobCreate.model_fields["learning_rate"].default
_MOST_ACCUMULATED = 1024
_EVENT, _METRIC, _CHECKPOINT = "ftevent-", "ftmetric-", "ftckpt-"
_STATUS: dict[str, Literal["queued", "running", "paused", "succeeded", "failed", "cancelled"]] = {
    "queued": "queued",
    "starting": "running",
    "running": "running",
    "saving": "running",
    "paused": "paused",
    "interrupted": "queued",
    "succeeded": "succeeded",
    "failed": "failed",
    "cancelled": "cancelled",
}
# What a field of ours is called in OpenAI's request.
_FIELDS = {
    "dataset": "training_file",
    "initial_adapter": "model",
    "base_model": "model",
    "adapter_name": "suffix",
    "epochs": "method.supervised.hyperparameters.n_epochs",
    "learning_rate": "method.supervised.hyperparameters.learning_rate_multiplier",
    "accumulation": "method.supervised.hyperparameters.batch_size",
    "job_id": "fine_tuning_job_id",
    "name": "suffix",
}


@contextmanager
def _in_openais_terms() -> Iterator[None]:
    """An error names the field of the request that was sent."""
    try:
        yield
    except HarliError as error:
        error.param = _FIELDS.get(error.param or "", error.param)
        raise


# ---- submitting ------------------------------------------------------------------------------------------------------


def create(control: Control, body: FineTuningCreate, key: str | None) -> FineTuningJob:
    """Check and queue a job. What Harli cannot do (a validation file, other methods than supervised finetuning,
    reports to other services) is refused rather than left out."""
    _require_supported(body)
    asked = _hyperparameters(body)
    with _in_openais_terms():
        dataset = datasets.get(control, body.training_file)
        base, initial = _model(control, body.model)
        wanted = schemas.JobCreate(
            dataset=dataset.id,
            adapter_name=_adapter_name(body, dataset, key),
            base_model=base,
            initial_adapter=initial,
            learning_rate=LEARNING_RATE * _number(asked.learning_rate_multiplier, 1.0),
            epochs=_number(asked.n_epochs, jobs.DEFAULT_EPOCHS),
            accumulation=accumulation(asked.batch_size, dataset, control.settings.finetune.micro_batch_tokens),
            seed=body.seed or 0,
        )
        job, new = jobs.submit(control, wanted, key)
    if new:
        with control.store.write() as session:
            session.add(rows.FineTuningRecord(job_id=job.id, request=body.model_dump(mode="json")))
    return _views(control, [job])[0]


def _require_supported(body: FineTuningCreate) -> None:
    if body.method is not None and body.method.type != "supervised":
        raise Invalid(
            "method",
            f"method.type is {body.method.type}; Harli does supervised finetuning with LoRA, so give supervised",
            "method.type",
        )
    if body.validation_file is not None:
        raise Invalid(
            "validation_file",
            "validation_file is not supported: a share of the training file's rows is held out for evaluation; leave "
            "it out",
            "validation_file",
        )
    if body.integrations:
        raise Invalid("integrations", "integrations are not supported; leave them out", "integrations")


def _hyperparameters(body: FineTuningCreate) -> Hyperparameters:
    nested = body.method.supervised if body.method is not None else None
    return (nested.hyperparameters if nested is not None else None) or body.hyperparameters or Hyperparameters()


def _number(value: float | str | None, default: float) -> float:
    """Of a hyperparameter that is left out or ``auto``: the default."""
    return default if value is None or isinstance(value, str) else float(value)


def accumulation(batch_size: int | str | None, dataset: schemas.Dataset, micro_batch_tokens: int) -> int:
    """Packed micro-batches that hold about so many rows. Raises Unavailable when nobody counted the rows' tokens,
    Invalid for more than a step can take."""
    if batch_size is None or isinstance(batch_size, str):
        return 1
    mean = dataset.report.mean_row_tokens
    if mean is None:
        raise Unavailable(
            "no_tokenizer",
            f"how many rows fill a micro-batch is not known for {dataset.name}, which was checked without the model's "
            "tokenizer; leave batch_size out, or upload the file again now that an engine has been here",
            "method.supervised.hyperparameters.batch_size",
        )
    wanted = max(1, round(batch_size * mean / micro_batch_tokens))
    if wanted > _MOST_ACCUMULATED:
        most = int(_MOST_ACCUMULATED * micro_batch_tokens / mean)
        raise Invalid(
            "batch_size",
            f"batch_size is {batch_size}; of rows of {mean:.0f} tokens an optimizer step takes up to {most}",
            "method.supervised.hyperparameters.batch_size",
        )
    return wanted


def _adapter_name(body: FineTuningCreate, dataset: schemas.Dataset, key: str | None) -> str:
    """The suffix; without one a name that no other job writes, and that is the same when the request comes again."""
    if body.suffix is not None:
        return name_of(body.suffix)
    tag = hashlib.sha256(key.encode()).hexdigest()[:6] if key is not None else secrets.token_hex(3)
    return f"{dataset.name[:50]}-{tag}"


def _model(control: Control, model: str) -> tuple[str | None, str | None]:
    """The base model beside the served one, or the adapter, that `model` names; neither for the served model."""
    with control.store.read() as session:
        served = served_model(control, session)
        name = model.removeprefix(f"{served}:")
        if name == served:
            return None, None
        if bases.of(engines.known(session), name) is not None:
            return name, None
        if adapter_rows.find(session, jobs.parse_adapter(name)[0]) is None:
            raise NotFound(
                "model_not_found",
                f"model is {model!r}; give {served}, the served model, another base model, or an adapter to go on from "
                "(client.models.list() shows those that are served)",
                "model",
            )
    return None, name


def served_model(control: Control, session: Session) -> str:
    """The name of the model that the engine serves, or will serve."""
    engine = engines.known(session)
    return str(engine.hello["model"]) if engine is not None else control.settings.model_folder.name


# ---- looking ---------------------------------------------------------------------------------------------------------


def get(control: Control, job_id: str) -> FineTuningJob:
    with _in_openais_terms():
        found = _views(control, [jobs.get(control, job_id)])[0]
        eta = outlook.of(control, job_id).eta if found.status in ("queued", "running") else None
    return found.model_copy(update={"estimated_finish": _seconds(eta) if eta is not None else None})


def page(control: Control, limit: int, after: str | None) -> Listed[FineTuningJob]:
    """Newest first."""
    cursor = None
    if after is not None:
        with control.store.read() as session:
            cursor = pages.cursor(_record(session, after, "after").seq)
    found = jobs.page(control, limit, cursor, None)
    shown = _views(control, found.items)
    return listed(shown, found.next is not None)


def cancel(control: Control, job_id: str) -> FineTuningJob:
    with _in_openais_terms():
        return _views(control, [jobs.stop(control, job_id, False)])[0]


def pause(control: Control, job_id: str) -> FineTuningJob:
    with _in_openais_terms():
        return _views(control, [jobs.pause(control, job_id)])[0]


def resume(control: Control, job_id: str) -> FineTuningJob:
    with _in_openais_terms():
        return _views(control, [jobs.resume(control, job_id)])[0]


def _views(control: Control, found: list[schemas.Job]) -> list[FineTuningJob]:
    with control.store.read() as session:
        asked = rows.requests(session, [job.id for job in found])
        served = served_model(control, session)
    return [
        _view(job, FineTuningCreate.model_validate(asked[job.id]) if job.id in asked else None, served) for job in found
    ]


def _view(job: schemas.Job, asked: FineTuningCreate | None, served: str) -> FineTuningJob:
    """A job that did not come in OpenAI's terms is told in them as well as they can say it."""
    spec = job.spec
    epochs = spec.epochs
    used = Hyperparameters(
        batch_size=(_hyperparameters(asked).batch_size if asked is not None else None) or "auto",
        learning_rate_multiplier=float(f"{spec.learning_rate / LEARNING_RATE:.6g}"),
        n_epochs=int(epochs) if epochs is not None and epochs >= 1 and float(epochs).is_integer() else None,
    )
    return FineTuningJob(
        id=job.id,
        created_at=_seconds(job.created_at),
        finished_at=_seconds(job.ended_at) if job.ended_at is not None else None,
        model=asked.model if asked is not None else spec.initial_adapter or spec.base_model or served,
        fine_tuned_model=job.adapter_name if job.state == "succeeded" else None,
        organization_id=job.tenant,
        status=_STATUS[job.state],
        training_file=job.dataset_id,
        hyperparameters=used,
        method=Method(supervised=Supervised(hyperparameters=used)),
        seed=spec.seed,
        trained_tokens=job.tokens if job.state in TERMINAL else None,
        result_files=[f"{RESULTS}{job.id}"] if job.state == "succeeded" else [],
        metadata=asked.metadata if asked is not None else None,
        error=_error(job),
    )


def _error(job: schemas.Job) -> OpenAIError | None:
    if job.error is None:
        return None
    return OpenAIError(message=job.error.message, type="job_error", param=job.error.param, code=job.error.code)


def _seconds(moment: datetime) -> int:
    return int(moment.timestamp())


def _record(session: Session, job_id: str, param: str = "fine_tuning_job_id") -> JobRecord:
    record = job_rows.find(session, job_id)
    if record is None:
        raise NotFound("job_not_found", f"there is no job {job_id}; client.fine_tuning.jobs.list() shows them", param)
    return record


# ---- what happened ---------------------------------------------------------------------------------------------------


def events(control: Control, job_id: str, limit: int, after: str | None) -> Listed[FineTuningEvent]:
    """Changes of state and what the steps measured, newest first."""
    with control.store.read() as session:
        job = _record(session, job_id)
        before = _place(session, job_id, after) if after is not None else None
        found = rows.history(session, job_id, limit + 1, before)
        happened = rows.events(session, [item.number for item in found if item.kind == rows.EVENT])
        measured = rows.metrics(session, job_id, [item.number for item in found if item.kind == rows.METRIC])
        shown = [
            _event(happened[item.number]) if item.kind == rows.EVENT else _metric(job, measured[item.number])
            for item in found[:limit]
        ]
    return listed(shown, len(found) > limit)


def _place(session: Session, job_id: str, event_id: str) -> rows.Happened:
    """Where an event that was listed is in the job's history."""
    number = event_id.rpartition("-")[2]
    if number.isdecimal() and len(number) < 19:
        at = int(number)
        if event_id.startswith(_EVENT) and (event := rows.events(session, [at]).get(at)) is not None:
            if event.job_id == job_id:
                return rows.Happened(event.time, rows.EVENT, at)
        elif event_id == f"{_METRIC}{job_id}-{at}" and (metric := rows.metrics(session, job_id, [at]).get(at)):
            return rows.Happened(metric.time, rows.METRIC, at)
    raise NotFound("event_not_found", f"after is {event_id}; job {job_id} has no such event", "after")


def _event(row: JobEventRecord) -> FineTuningEvent:
    level: Literal["info", "warn", "error"] = "info"
    if row.to_state in ("failed", "interrupted"):
        level = "error" if row.to_state == "failed" else "warn"
    return FineTuningEvent(
        id=f"{_EVENT}{row.id}",
        created_at=_seconds(row.time),
        level=level,
        message=row.message or row.kind,
        type="message",
    )


def _metric(job: JobRecord, row: JobMetricRecord) -> FineTuningEvent:
    of_total = f"/{job.total_steps}" if job.total_steps else ""
    figures = {"train_loss": row.loss, "valid_loss": row.eval_loss, "learning_rate": row.learning_rate}
    given = {name: value for name, value in figures.items() if value is not None}
    words = {"train_loss": "training loss", "valid_loss": "validation loss"}
    said = ", ".join(f"{words[name]}={value:.4f}" for name, value in given.items() if name in words)
    return FineTuningEvent(
        id=f"{_METRIC}{job.id}-{row.step}",
        created_at=_seconds(row.time),
        level="info",
        message=f"Step {row.step}{of_total}: {said or 'no loss'}",
        type="metrics",
        data={"step": row.step, "total_steps": job.total_steps, **given},
    )


def checkpoints(control: Control, job_id: str, limit: int, after: str | None) -> Listed[FineTuningCheckpoint]:
    """Newest first: the stored adapter once there is one, and the checkpoint that the job goes on from. Older ones
    make room for newer ones."""
    with control.store.read() as session:
        job = _record(session, job_id)
        names: dict[int, tuple[str, datetime]] = {}
        if job.checkpoint_step is not None and job.state not in TERMINAL:
            step = job.checkpoint_step
            names[step] = (f"{job.adapter_name}:step-{step}", rows.checkpoint_time(session, job_id) or job.state_since)
        if job.adapter_version is not None:
            names[job.step] = (f"{job.adapter_name}@{job.adapter_version}", job.ended_at or job.state_since)
        found = [_checkpoint(session, job_id, step, *names[step]) for step in sorted(names, reverse=True)]
    if after is not None:
        ids = [checkpoint.id for checkpoint in found]
        if after not in ids:
            raise NotFound("checkpoint_not_found", f"after is {after}; job {job_id} has no such checkpoint", "after")
        found = found[ids.index(after) + 1 :]
    return listed(found[:limit], len(found) > limit)


def _checkpoint(session: Session, job_id: str, step: int, name: str, time: datetime) -> FineTuningCheckpoint:
    loss, eval_loss = rows.metric_until(session, job_id, step)
    return FineTuningCheckpoint(
        id=f"{_CHECKPOINT}{job_id}-{step}",
        created_at=_seconds(time),
        fine_tuning_job_id=job_id,
        fine_tuned_model_checkpoint=name,
        step_number=step,
        metrics=CheckpointMetrics(step=step, train_loss=loss, valid_loss=eval_loss),
    )
