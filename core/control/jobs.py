"""Jobs: submitting, looking at them, and what people ask of them. The dispatcher does what is asked."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError
from sqlalchemy import Row
from sqlalchemy.orm import Session

from core.api import presets, schemas
from core.api.job_schemas import JobEstimate, JobSample
from core.control import aliases, bases, engines, estimates, pages, quotas, speed, webhooks
from core.control import telemetry as history
from core.control.context import Control, new_id
from core.control.lifecycle import remark, transition
from core.errors import Conflict, Invalid, NotFound
from core.intake import adapter as adapter_files
from core.intake import packing, rows, tokenizer
from db import adapters as adapter_rows
from db import changes, idempotency
from db import datasets as dataset_rows
from db import engines as engine_rows
from db import jobs as job_rows
from db import samples as sample_rows
from db.adapters import AdapterRecord
from db.base import now
from db.datasets import DatasetRecord
from db.engines import EngineRecord
from db.jobs import IN_ENGINE, TERMINAL, JobRecord
from db.scope import home, sees

DEFAULT_EPOCHS = 3.0
_LONGEST_WAIT = timedelta(days=3652)
# A job that was interrupted this often in a row without a new checkpoint is not resumed by itself any more.
MAX_STALLS = 3
_SPEC, _LORA = schemas.JobCreate.model_fields.keys(), schemas.LoraBody.model_fields.keys()
# The columns of a listing.
_SHOWN = tuple(name for name in schemas.Job.model_fields if name in JobRecord.__mapper__.columns)

# ---- looking ---------------------------------------------------------------------------------------------------------


def get(control: Control, job_id: str) -> schemas.Job:
    with control.store.read() as session:
        return views(session, [require(session, job_id)])[0]


def page(control: Control, limit: int, cursor: str | None, state: str | None) -> schemas.Page[schemas.Job]:
    return schemas.Page[schemas.Job].model_validate(_page(control, limit, cursor, state))


def page_json(control: Control, limit: int, cursor: str | None, state: str | None) -> bytes:
    """The same as JSON, without the models between."""
    return msgspec.json.encode(_page(control, limit, cursor, state))


def _page(control: Control, limit: int, cursor: str | None, state: str | None) -> dict[str, Any]:
    """A `schemas.Page` of jobs in plain values; times are datetimes."""
    before = pages.key(cursor, int)
    with control.store.read() as session:
        found = job_rows.page(session, _SHOWN, limit + 1, before, state)
        shown = found[:limit]
        reasons = _waiting_reasons(session) if any(row.state not in TERMINAL for row in shown) else {}
    items = [dict(zip(_SHOWN, row, strict=False)) for row in shown]
    for item in items:
        item["spec"] = _spec(item["spec"])
        item["waiting_reason"] = reasons.get(item["id"])
    return {"items": items, "next": pages.cursor(shown[-1].seq) if len(found) > limit else None}


def _spec(stored: str) -> dict[str, Any]:
    """What a job was asked with; one of an earlier version has what came since by default."""
    spec: dict[str, Any] = msgspec.json.decode(stored)
    if spec.keys() != _SPEC or spec["lora"].keys() != _LORA:
        return schemas.JobCreate.model_validate(spec).model_dump(mode="json")
    return spec


def events(control: Control, job_id: str, after: int, limit: int) -> list[schemas.JobEvent]:
    with control.store.read() as session:
        require(session, job_id)
        found = job_rows.events(session, job_id, after, limit)
        return [schemas.JobEvent.model_validate(row, from_attributes=True) for row in found]


def metrics(control: Control, job_id: str, after: int, limit: int) -> list[schemas.JobMetric]:
    with control.store.read() as session:
        require(session, job_id)
        found = job_rows.metrics(session, job_id, after, limit)
        return [schemas.JobMetric.model_validate(row, from_attributes=True) for row in found]


def log(control: Control, job_id: str, after: int, limit: int) -> list[schemas.JobLogLine]:
    with control.store.read() as session:
        require(session, job_id)
        found = job_rows.log(session, job_id, after, limit)
        return [schemas.JobLogLine.model_validate(row, from_attributes=True) for row in found]


def samples(control: Control, job_id: str) -> list[JobSample]:
    with control.store.read() as session:
        require(session, job_id)
        return [JobSample.model_validate(row, from_attributes=True) for row in sample_rows.of_job(session, job_id)]


def views(session: Session, records: Iterable[JobRecord]) -> list[schemas.Job]:
    """As the API shows them, with the reason why one that could run does not."""
    records = list(records)
    reasons = _waiting_reasons(session) if any(job.state not in TERMINAL for job in records) else {}
    return [
        schemas.Job.model_validate(
            {**{name: getattr(job, name) for name in _SHOWN}, "waiting_reason": reasons.get(job.id)}
        )
        for job in records
    ]


def _waiting_reasons(session: Session) -> dict[str, str]:
    """Of every job that has not ended and does not move."""
    waiting = job_rows.brief(session, (*IN_ENGINE, "queued", "interrupted", "paused"))
    engine = engine_rows.state(session)
    held = next((job for job in waiting if job.state in IN_ENGINE), None)
    busy = None if held is None else _busy(session, held)
    blocked = quotas.reasons(session)
    reasons: dict[str, str] = {}
    position = 0
    for job in waiting:
        if job.command is not None and job.state not in ("starting", "saving"):
            wishes = {"pause": "to be paused", "stop": "to be stopped", "save": "to be stopped and saved"}
            reasons[job.id] = f"it is about {wishes[job.command]}"
        elif job.state == "running":
            if (reason := history.paused_reason(session)) is not None:
                reasons[job.id] = f"finetuning stands still for the moment: {reason}"
        elif job.state == "paused" and job.held:
            reasons[job.id] = blocked.get(job.tenant, "it goes on within a moment")
        elif job.state == "paused":
            reasons[job.id] = "it is paused; resume it to put it back in the queue"
        elif job.state == "interrupted" and job.stalls >= MAX_STALLS:
            reasons[job.id] = (
                f"it was interrupted {job.stalls} times in a row without getting to a new checkpoint; see its events, "
                "and resume it by hand once the cause is gone"
            )
        elif job.state in ("queued", "interrupted"):
            position += 1
            reasons[job.id] = blocked.get(job.tenant) or _queue_reason(engine, busy, position)
    return reasons


def _busy(session: Session, job: Row[*tuple[Any, ...]]) -> str:
    """What the engine does for a job, in words that tell nothing of another tenant's."""
    shown = f"job {job.id} ({job.name})" if sees(session, job.tenant) else "a job of another tenant"
    return f"{shown} is {job.state}"


def _queue_reason(engine: str | None, busy: str | None, position: int) -> str:
    """`engine`: its state, None without one."""
    if engine in (None, "gone"):
        return f"no engine is connected (number {position} in the queue)"
    if engine == "lost":
        return f"the engine does not answer (number {position} in the queue)"
    if busy is not None:
        return f"{busy}; one job runs at a time (number {position} in the queue)"
    if position == 1:
        return "it is next and starts within a moment"
    return f"jobs of a higher priority, or older, come first (number {position} in the queue)"


def require(session: Session, job_id: str) -> JobRecord:
    """The job; raises NotFound when there is none, or it is not the session's to see."""
    job = job_rows.find(session, job_id)
    if job is None:
        raise NotFound("job_not_found", f"there is no job {job_id}; `harli jobs` lists them", "job_id")
    return job


# ---- submitting ------------------------------------------------------------------------------------------------------


def submit(
    control: Control, body: schemas.JobCreate, key: str | None, *, schedule_id: str | None = None
) -> tuple[schemas.Job, bool]:
    """Check and queue a job; (the job, whether it is new). A key that came before answers with its job.

    Raises Invalid, NotFound or Conflict, naming the field, before anything is stored.
    """
    fingerprint = hashlib.sha256(json.dumps(body.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()
    with control.store.read() as session:
        if (earlier := _earlier(control, session, key, fingerprint)) is not None:
            return earlier, False
        dataset = _dataset(session, body)
        body = bases.resolved(body, engines.known(session))
        model = bases.folder(session, control.settings, body.base_model)
        body = _preset(control, body, dataset, engines.known(session))
    spec = _resolved(control, body)
    lengths = _lengths(control, dataset, model, spec)
    todo = estimates.work(lengths, spec) if lengths else None
    with control.store.write() as session:
        # Everything that may have changed since it was read is looked at again where it cannot change any more.
        if (earlier := _earlier(control, session, key, fingerprint)) is not None:
            return earlier, False
        dataset = _dataset(session, body)
        engine = engines.known(session)
        spec, initial, version = _initial(session, bases.resolved(spec, engine))
        _check_engine(spec, engine)
        _check_output(session, spec)
        quotas.check_priority(session, control, control.principal.tenant, spec.priority)
        quotas.check_waiting(session, control.principal.tenant)
        time = now()
        job = JobRecord(
            id=new_id("job"),
            tenant=control.principal.tenant,
            name=body.name or f"{body.adapter_name} on {dataset.name}"[:120],
            state="queued",
            spec=spec.model_dump(mode="json"),
            dataset_id=dataset.id,
            dataset_name=dataset.name,
            adapter_name=body.adapter_name,
            initial_adapter=initial,
            initial_version=version,
            created_at=time,
            state_since=time,
            priority=body.priority,
            deadline=body.deadline,
            schedule_id=schedule_id,
            expected_tokens=todo.tokens if todo is not None else None,
        )
        session.add(job)
        session.flush()
        session.add(
            job_rows.JobEventRecord(job_id=job.id, time=time, kind="submitted", to_state="queued", message="submitted")
        )
        changes.add(session, "jobs", "submitted", job.id, tenant=job.tenant, state="queued")
        webhooks.tell(session, job, "submitted", "submitted")
        if key is not None:
            session.add(
                idempotency.IdempotencyRecord(
                    tenant=job.tenant, key=key, fingerprint=fingerprint, job_id=job.id, created_at=time
                )
            )
        session.flush()
        return views(session, [job])[0], True


def _earlier(control: Control, session: Session, key: str | None, fingerprint: str) -> schemas.Job | None:
    if key is None:
        return None
    record = session.get(idempotency.IdempotencyRecord, (control.principal.tenant, key))
    if record is None:
        return None
    if record.fingerprint != fingerprint:
        raise Conflict(
            "idempotency_key_reused",
            f"the Idempotency-Key {key!r} was used for job {record.job_id} with another request; use a new key for a "
            "new job",
            "Idempotency-Key",
        )
    return views(session, [require(session, record.job_id)])[0]


def estimate(control: Control, body: schemas.JobCreate) -> JobEstimate:
    """What the job would take if it were submitted now. Raises what `submit` would raise, but for a taken name."""
    with control.store.read() as session:
        dataset = _dataset(session, body)
        engine = engines.known(session)
        body = bases.resolved(body, engine)
        model = bases.folder(session, control.settings, body.base_model)
        body = _preset(control, body, dataset, engine)
        spec = _initial(session, _resolved(control, body))[0]
        _check_engine(spec, engine)
        quotas.check_priority(session, control, control.principal.tenant, spec.priority)
        open_ = job_rows.in_states(session, ("queued", "interrupted", *IN_ENGINE), everyones=True)
        before = [job for job in open_ if job.state in IN_ENGINE or job.priority >= spec.priority]
        measured = speed.measured(session)
    return estimates.estimate(
        spec,
        dataset.report["rows"],
        _lengths(control, dataset, model, spec),
        speed=measured,
        before=before,
        engine=engine,
        model=model,
    )


def clone(control: Control, job_id: str, changed: Mapping[str, Any], key: str | None) -> tuple[schemas.Job, bool]:
    """Submit a job once more, with some fields changed: those of a `JobCreate`, and in `lora` too."""
    with control.store.read() as session:
        job = require(session, job_id)
        spec = dict(job.spec)
        if dataset_rows.find(session, job.dataset_id) is not None:
            spec["dataset"] = job.dataset_id
    if job.initial_adapter is not None:
        spec["initial_adapter"] = f"{job.initial_adapter}@{job.initial_version}"
    lora = dict(spec["lora"])
    # What the old job was resolved to is given from here on; what the new one brings with it takes its place.
    dropped = {"deadline", "preset"}
    if changed.get("preset") is not None:
        dropped |= presets.FIELDS
        lora = {name: value for name, value in lora.items() if name not in presets.LORA_FIELDS}
    if "max_steps" in changed:
        dropped.add("epochs")
    if "epochs" in changed:
        dropped.add("max_steps")
    if "micro_batch_tokens" in changed:
        dropped.add("sequence_length")
    if "base_model" in changed:
        dropped.add("deploy")
    if "initial_adapter" in changed:
        lora = {name: value for name, value in lora.items() if name not in ("rank", "alpha", "target_modules")}
    merged = {name: value for name, value in spec.items() if name not in dropped and value is not None}
    new_lora = changed.get("lora")
    merged |= {**changed, "lora": {**lora, **new_lora} if isinstance(new_lora, Mapping) else new_lora or lora}
    try:
        body = schemas.JobCreate.model_validate(merged)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(["changes", *(str(part) for part in fault["loc"])])
        raise Invalid("invalid_request", f"{place}: {fault['msg']}", place) from error
    return submit(control, body, key)


def _preset(
    control: Control, body: schemas.JobCreate, dataset: DatasetRecord, engine: EngineRecord | None
) -> schemas.JobCreate:
    """With what the preset makes of this data set, within what the engine can serve."""
    return presets.applied(
        body,
        dataset.report["rows"],
        dataset.report["tokens"],
        micro_batch_tokens=control.settings.finetune.micro_batch_tokens,
        max_rank=engine.hello["max_lora_rank"] if engine is not None else control.settings.engine.max_lora_rank,
    )


def _resolved(control: Control, body: schemas.JobCreate) -> schemas.JobCreate:
    """The job with every default filled in, as it is stored and run."""
    _check_evaluation(body)
    _check_deadline(body.deadline)
    if body.epochs is not None and body.max_steps is not None:
        raise Invalid(
            "epochs_and_max_steps",
            f"epochs is {body.epochs:g} and max_steps is {body.max_steps}; give one of them and leave the other out",
            "max_steps",
        )
    tokens = body.micro_batch_tokens or control.settings.finetune.micro_batch_tokens
    length = body.sequence_length or tokens
    if length > tokens:
        raise Invalid(
            "sequence_length",
            f"sequence_length is {length} and a micro-batch holds {tokens} tokens; lower it, or raise "
            f"micro_batch_tokens to {length}",
            "sequence_length",
        )
    epochs = body.epochs if body.max_steps is not None else body.epochs or DEFAULT_EPOCHS
    return body.model_copy(update={"micro_batch_tokens": tokens, "sequence_length": length, "epochs": epochs})


def _check_deadline(deadline: datetime | None) -> None:
    if deadline is not None and not now() < deadline < now() + _LONGEST_WAIT:
        raise Invalid(
            "deadline",
            f"deadline is {deadline:%Y-%m-%d %H:%M %Z}; give a moment that is still to come, within ten years",
            "deadline",
        )


def _check_evaluation(body: schemas.JobCreate) -> None:
    """Raise Invalid for what hangs on evaluations that there will not be."""
    hanging = [name for name in ("patience", "keep_best", "sample_prompts") if getattr(body, name)]
    if hanging and body.evaluation_fraction == 0:
        raise Invalid(
            "no_evaluation",
            f"{hanging[0]} needs evaluations and evaluation_fraction is 0, so that there is no row for them; give a "
            "fraction such as 0.05",
            "evaluation_fraction",
        )
    if body.evaluate_every == 0 and (body.patience or body.keep_best):
        raise Invalid(
            "no_evaluation",
            f"{hanging[0]} needs evaluations on the way and evaluate_every is 0, which is one at the end; give the "
            "steps between them",
            "evaluate_every",
        )


def _dataset(session: Session, body: schemas.JobCreate) -> DatasetRecord:
    dataset = dataset_rows.find(session, body.dataset)
    if dataset is None:
        raise NotFound(
            "dataset_not_found",
            f"there is no data set {body.dataset!r}; upload it first, `harli datasets` lists those there are",
            "dataset",
        )
    return dataset


def _lengths(control: Control, dataset: DatasetRecord, model: Path | None, spec: schemas.JobCreate) -> list[int] | None:
    """The tokens of each row, every one of which must fit. None without a tokenizer (no engine was here yet): then the
    engine checks when the job starts."""
    if model is None:
        return None
    assert spec.micro_batch_tokens is not None and spec.sequence_length is not None
    path = control.dataset_file(dataset.id)
    tokens = tokenizer.load(model)
    lengths = rows.lengths(path, tokens)
    if lengths is None:
        lengths = [len(row.ids) for row in packing.load_encoded(path, tokens)]
    try:
        packing.check_lengths(
            path, lengths, micro_batch_tokens=spec.micro_batch_tokens, sequence_length=spec.sequence_length
        )
    except Invalid as error:
        raise Invalid(error.code, f"data set {dataset.name}: {error.message}", error.param) from error
    return lengths


def parse_adapter(reference: str) -> tuple[str, int | None]:
    """``name`` or ``name@version``."""
    name, _, version = reference.partition("@")
    if version and not version.isdigit():
        raise Invalid(
            "initial_adapter",
            f"initial_adapter is {reference!r}; give a name, name@version with a number, such as {name}@2, or an alias",
            "initial_adapter",
        )
    return name, int(version) if version else None


def _initial(session: Session, body: schemas.JobCreate) -> tuple[schemas.JobCreate, str | None, int | None]:
    """The job with the shape of the adapter that it starts from, and that adapter's name and version.

    What `lora` leaves out is the adapter's; raises Invalid for what it says otherwise.
    """
    if body.initial_adapter is None:
        return body, None, None
    name, version = parse_adapter(aliases.numbered(session, body.initial_adapter))
    adapter: AdapterRecord | None = adapter_rows.find(session, name)
    row = adapter_rows.version_of(adapter, version) if adapter is not None else None
    if row is None:
        raise NotFound(
            "adapter_not_found",
            f"there is no adapter {body.initial_adapter!r} to start from; `harli adapters` lists those there are",
            "initial_adapter",
        )
    if not bases.fits(engines.known(session), row, body.base_model):
        raise Invalid(
            "initial_adapter_base",
            f"adapter {name}@{row.version} belongs to base model {row.base} and the job trains "
            f"{body.base_model or 'the served one'}; give base_model {row.base}, or start from another adapter",
            "initial_adapter",
        )
    # Stored adapters have rank-stabilised scaling folded into alpha.
    alpha = row.alpha / math.sqrt(row.rank) if body.lora.use_rslora else row.alpha
    shape = {"rank": row.rank, "alpha": alpha, "target_modules": sorted(row.target_modules)}
    given = {name: getattr(body.lora, name) for name in body.lora.model_fields_set & shape.keys()}
    if "target_modules" in given:
        given["target_modules"] = sorted(set(given["target_modules"]))
    for field, value in given.items():
        if value != shape[field] and field != "alpha":
            raise Invalid(
                "initial_adapter_shape",
                f"lora.{field} is {value} and adapter {name}@{row.version} has {shape[field]}; leave it out, or start "
                "from another adapter",
                f"lora.{field}",
            )
    lora = body.lora.model_copy(update={**shape, **given})
    return body.model_copy(update={"lora": lora}), name, row.version


def _check_engine(body: schemas.JobCreate, engine: EngineRecord | None) -> None:
    """What the engine (the present one, else the last) cannot serve is refused; the first one is waited for."""
    if engine is None:
        return
    hello = engine.hello
    if body.lora.rank > hello["max_lora_rank"]:
        raise Invalid(
            "rank_too_large",
            f"lora.rank is {body.lora.rank} and the engine serves ranks up to {hello['max_lora_rank']}; lower it, or "
            "start the engine with a larger HARLI_ENGINE__MAX_LORA_RANK",
            "lora.rank",
        )
    unknown = [module for module in body.lora.target_modules if module not in hello["lora_modules"]]
    if unknown:
        raise Invalid(
            "target_modules",
            f"lora.target_modules names {', '.join(unknown)}; the engine can serve {', '.join(hello['lora_modules'])}",
            "lora.target_modules",
        )
    if lacking := adapter_files.alone(body.lora.target_modules):
        raise Invalid("target_modules", f"the adapter that is asked for {lacking}; name both", "lora.target_modules")
    if slot := hello.get("finetune_slot"):
        _check_slot(body, *slot)
    if body.adapter_name == hello["model"]:
        raise Conflict(
            "name_taken",
            f"{body.adapter_name} is the served model's own name; give the adapter another",
            "adapter_name",
        )


def _check_slot(body: schemas.JobCreate, rank: int, tokens: int) -> None:
    """Raise Invalid for what the engine's captured tasklets, made at its start, do not run."""
    faults = {
        "lora.rank": body.lora.rank > rank and f"lora.rank is {body.lora.rank}; give at most {rank}",
        "lora.dropout": body.lora.dropout > 0 and f"lora.dropout is {body.lora.dropout:g}; give 0",
        "micro_batch_tokens": body.micro_batch_tokens != tokens
        and f"micro_batch_tokens is {body.micro_batch_tokens}; give {tokens}, or leave it out",
    }
    for field, fault in faults.items():
        if fault:
            raise Invalid(
                "no_slot",
                f"{fault}: the engine captured finetuning of rank {rank} and {tokens} tokens without dropout when it "
                "started (HARLI_ENGINE__CAPTURED=false runs any job, slower)",
                field,
            )


def _check_output(session: Session, body: schemas.JobCreate) -> None:
    other = job_rows.open_with_output(session, body.adapter_name)
    if adapter_rows.taken(session, body.adapter_name) or (other is not None and other.tenant != home(session)):
        raise Conflict(
            "name_taken",
            f"the name {body.adapter_name} is taken: the engine serves every tenant, so a name is one tenant's only; "
            "give another adapter_name",
            "adapter_name",
        )
    if other is not None:
        raise Conflict(
            "adapter_name_busy",
            f"job {other.id} ({other.state}) will write adapter {body.adapter_name}; wait for it, stop it, or give "
            "another adapter_name",
            "adapter_name",
        )


# ---- asking ----------------------------------------------------------------------------------------------------------


def pause(control: Control, job_id: str) -> schemas.Job:
    """Pause now (when no engine holds the job) or at the engine's next step. Pausing twice is pausing once."""
    with control.store.write() as session:
        job = require(session, job_id)
        job.held = False
        if job.state in ("queued", "interrupted"):
            transition(session, job, "paused", "paused", "paused while it waited")
        elif job.state in ("starting", "running") and job.command in (None, "pause"):
            _ask(session, job, "pause")
        elif job.state != "paused":
            raise _refused(job, "paused", "queued, starting, running or interrupted")
        session.flush()
        return views(session, [job])[0]


def resume(control: Control, job_id: str) -> schemas.Job:
    """Back into the queue, at its old place; the dispatcher hands it out from its newest checkpoint."""
    with control.store.write() as session:
        job = require(session, job_id)
        if job.state not in ("paused", "interrupted"):
            raise _refused(job, "resumed", "paused or interrupted")
        job.stalls = 0
        transition(session, job, "queued", "resumed", "resumed; it goes on from its newest checkpoint")
        session.flush()
        return views(session, [job])[0]


def stop(control: Control, job_id: str, save: bool) -> schemas.Job:
    """End a job, with its adapter as it stands or without. One that no engine holds ends at once."""
    with control.store.write() as session:
        job = require(session, job_id)
        if save and job.state not in (*TERMINAL, "saving") and not _has_progress(job):
            raise Conflict(
                "nothing_to_save",
                f"job {job.id} is {job.state} and has not finished a step, so there is nothing to save; stop it "
                "without saving",
                "save",
            )
        if job.state in ("queued", "paused", "interrupted"):
            if save:
                save_from_checkpoint(session, job)
            else:
                transition(session, job, "cancelled", "cancelled", f"stopped while it was {job.state}")
        elif job.state in ("starting", "running") and (job.command != "stop" or not save):
            _ask(session, job, "save" if save else "stop")
        elif job.state != "saving" or not save:
            raise _refused(job, "stopped", "anything but saving, succeeded, failed or cancelled")
        session.flush()
        return views(session, [job])[0]


def update(control: Control, job_id: str, patch: schemas.JobPatch) -> schemas.Job:
    """Change priority, deadline or name of a job; the first two of one that has not ended."""
    _check_deadline(patch.deadline)
    with control.store.write() as session:
        job = require(session, job_id)
        if job.state in TERMINAL and patch.model_fields_set & {"priority", "deadline"}:
            raise _refused(job, "reprioritised", "anything but succeeded, failed or cancelled")
        if patch.priority is not None and patch.priority != job.priority:
            if patch.priority > job.priority:
                quotas.check_priority(session, control, job.tenant, patch.priority)
            remark(session, job, "priority", f"priority {job.priority} → {patch.priority}")
            job.priority = patch.priority
        if "deadline" in patch.model_fields_set and patch.deadline != job.deadline:
            shown = f"{patch.deadline:%Y-%m-%d %H:%M %Z}" if patch.deadline is not None else "none any more"
            remark(session, job, "deadline", f"deadline: {shown}")
            job.deadline, job.deadline_warned = patch.deadline, False
        if patch.name is not None:
            job.name = patch.name
            changes.add(session, "jobs", "renamed", job.id, tenant=job.tenant, state=job.state)
        session.flush()
        return views(session, [job])[0]


def delete(control: Control, job_id: str) -> None:
    """Forget a job that has ended, with its figures and checkpoints. The adapter that it made stays."""
    with control.store.write() as session:
        job = require(session, job_id)
        if job.state not in TERMINAL:
            raise _refused(job, "deleted", "succeeded, failed or cancelled")
        session.delete(job)
        changes.add(session, "jobs", "deleted", job.id, tenant=job.tenant)
    shutil.rmtree(control.job_folder(job_id), ignore_errors=True)


def _has_progress(job: JobRecord) -> bool:
    """In an engine a finished step can be saved, elsewhere only a checkpoint."""
    return bool(job.step if job.state in IN_ENGINE else job.checkpoint_step)


def save_from_checkpoint(session: Session, job: JobRecord) -> None:
    """Send a job that no engine holds to `saving`; the dispatcher stores its newest checkpoint's adapter."""
    if job.state == "queued":
        transition(session, job, "paused", "paused", "taken out of the queue to be saved")
    message = f"saving the adapter from the checkpoint of step {job.checkpoint_step}"
    transition(session, job, "saving", "saving", message)
    job.command, job.command_at = "save", now()
    job.token = job.engine_id = None


def _ask(session: Session, job: JobRecord, command: str) -> None:
    if job.command == command:
        return
    words = {"pause": "asked to pause", "stop": "asked to stop", "save": "asked to stop and save"}
    remark(session, job, f"{command}_asked", words[command])
    job.command, job.command_at = command, now()


def _refused(job: JobRecord, what: str, states: str) -> Conflict:
    doing = f" and {job.command} was asked of it" if job.command is not None else ""
    return Conflict("job_state", f"job {job.id} is {job.state}{doing}; it can be {what} while it is {states}", "job_id")
