"""Bodies of the routes under /v1, in the shapes of OpenAI's API, so that its clients work against Harli as they are.

A file is a version of a data set, a fine-tuned model an adapter. Times are whole seconds since 1970.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, Field

from core.api.schemas import Storable

T = TypeVar("T")
Purpose = Literal["fine-tune", "fine-tune-results"]


class Listed(BaseModel, Generic[T]):
    """A page; the next one has `after` = the last one's id."""

    object: Literal["list"] = "list"
    data: list[T]
    has_more: bool = False
    first_id: str | None = None
    last_id: str | None = None


def listed(items: list[T], has_more: bool) -> Listed[T]:
    """A page of things with ids."""
    ids = [str(getattr(item, "id", "")) for item in items]
    return Listed(data=items, has_more=has_more, first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None)


class OpenAIError(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class OpenAIErrorBody(BaseModel):
    error: OpenAIError


class Deleted(BaseModel):
    id: str
    object: Literal["file", "model"]
    deleted: Literal[True] = True


# ---- files -----------------------------------------------------------------------------------------------------------


class File(BaseModel):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"
    status_details: str | None = Field(None, description="what the check of the file remarked")


# ---- fine-tuning jobs ------------------------------------------------------------------------------------------------


class Hyperparameters(Storable):
    """`n_epochs`: passes over the file (auto: 3). `batch_size`: rows of an optimizer step, to the nearest whole number
    of packed micro-batches (auto: one micro-batch). `learning_rate_multiplier`: times 1e-3 (auto: 1)."""

    batch_size: Literal["auto"] | Annotated[int, Field(ge=1, le=4096)] | None = None
    learning_rate_multiplier: Literal["auto"] | Annotated[float, Field(gt=0, le=1000)] | None = None
    n_epochs: Literal["auto"] | Annotated[int, Field(ge=1, le=1000)] | None = None


class Supervised(Storable):
    hyperparameters: Hyperparameters | None = None


class Method(BaseModel):
    type: Literal["supervised", "dpo", "reinforcement"] = "supervised"
    supervised: Supervised | None = None


class FineTuningCreate(Storable):
    """`model`: the served model, or an adapter to go on from (``name`` or ``name@version``). `suffix`: the name of the
    adapter that comes of it; left out, one is made of the file's name."""

    model: str = Field(min_length=1, max_length=200)
    training_file: str = Field(min_length=1, max_length=120)
    suffix: str | None = Field(None, min_length=1, max_length=63)
    seed: int | None = Field(None, ge=0, lt=2**31)
    method: Method | None = None
    hyperparameters: Hyperparameters | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)
    validation_file: str | None = None
    integrations: list[Any] | None = None


class FineTuningJob(BaseModel):
    """`status` knows one more word than OpenAI's client: paused."""

    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int
    finished_at: int | None = None
    estimated_finish: int | None = None
    model: str
    fine_tuned_model: str | None = None
    organization_id: str
    status: Literal["queued", "running", "paused", "succeeded", "failed", "cancelled"]
    training_file: str
    validation_file: None = None
    hyperparameters: Hyperparameters
    method: Method
    seed: int
    trained_tokens: int | None = None
    result_files: list[str] = []
    integrations: list[Any] = []
    metadata: dict[str, str] | None = None
    error: OpenAIError | None = None


class FineTuningEvent(BaseModel):
    """A change of a job's state (`type` message) or what a step measured (`type` metrics, figures in `data`)."""

    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int
    level: Literal["info", "warn", "error"]
    message: str
    type: Literal["message", "metrics"]
    data: dict[str, Any] | None = None


class CheckpointMetrics(BaseModel):
    step: int
    train_loss: float | None = None
    valid_loss: float | None = None


class FineTuningCheckpoint(BaseModel):
    """What a job has written: `fine_tuned_model_checkpoint` is ``adapter@version`` once that is stored; before, it
    names a checkpoint that only the job itself goes on from."""

    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int
    fine_tuning_job_id: str
    fine_tuned_model_checkpoint: str
    step_number: int
    metrics: CheckpointMetrics


# ---- models ----------------------------------------------------------------------------------------------------------


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    parent: str | None = Field(None, description="of an adapter: the model that it was trained for")
