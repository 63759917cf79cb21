"""What the engine is told to run, and from where."""

from __future__ import annotations

import json
from pathlib import Path

from sqlalchemy.orm import Session

from core.api import schemas
from core.control.context import Control
from core.errors import HarliError
from core.link.messages import JobSpec, LoraSpec
from db import datasets as dataset_rows
from db.jobs import JobRecord


def spec(control: Control, session: Session, job: JobRecord) -> JobSpec:
    """What the engine gets; raises when something the job needs has disappeared."""
    body = schemas.JobCreate.model_validate(job.spec)
    dataset = dataset_rows.find(session, job.dataset_id)
    path = control.dataset_file(job.dataset_id)
    if dataset is None or not path.is_file():
        raise HarliError(
            "dataset_missing",
            f"the file of data set {job.dataset_name} is gone ({path}); upload it again",
            "dataset",
        )
    initial = None
    if job.initial_adapter is not None and job.initial_version is not None:
        initial = control.adapter_folder(job.initial_adapter, job.initial_version)
        if not initial.is_dir():
            name = f"{job.initial_adapter}@{job.initial_version}"
            raise HarliError("adapter_missing", f"adapter {name} is gone; upload it again", "initial_adapter")
    assert body.micro_batch_tokens is not None and body.sequence_length is not None
    return JobSpec(
        job_id=job.id,
        tenant=job.tenant,
        base_model=body.base_model,
        dataset_path=str(path),
        adapter_name=job.adapter_name,
        output_dir=str(control.job_folder(job.id)),
        initial_adapter=str(initial) if initial is not None else None,
        lora=LoraSpec(**{**body.lora.model_dump(), "target_modules": tuple(body.lora.target_modules)}),
        learning_rate=body.learning_rate,
        schedule=body.schedule,
        warmup_ratio=body.warmup_ratio,
        weight_decay=body.weight_decay,
        max_grad_norm=body.max_grad_norm,
        epochs=body.epochs,
        max_steps=body.max_steps,
        micro_batch_tokens=body.micro_batch_tokens,
        accumulation=body.accumulation,
        sequence_length=body.sequence_length,
        seed=body.seed,
        evaluation_fraction=body.evaluation_fraction,
        evaluate_every=body.evaluate_every,
        checkpoint_every=body.checkpoint_every,
        patience=body.patience,
        keep_best=body.keep_best,
        sample=bool(body.sample_prompts),
        priority=job.priority,
    )


def adapter_folder(job_folder: Path, checkpoint: Path, keep_best: bool) -> Path:
    """The adapter of a checkpoint; with `keep_best` that of the best evaluation until then, if there was one."""
    if keep_best:
        best = json.loads((checkpoint / "state.json").read_bytes()).get("best_step")
        if best is not None:
            return job_folder / "evaluated" / f"step-{best:08d}"
    return checkpoint / "adapter"


def newest_checkpoint(job_folder: Path, recorded: str | None) -> Path | None:
    """The newest whole checkpoint on disk: the engine may have written one that it could no longer report, and old
    ones are pruned."""
    found = sorted(
        (path for path in (job_folder / "checkpoints").glob("step-*") if (path / "state.json").is_file()),
        key=lambda path: int(path.name.rpartition("-")[2]),
    )
    if found:
        return found[-1]
    return Path(recorded) if recorded is not None and Path(recorded).is_dir() else None
