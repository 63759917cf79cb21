"""/v1/fine_tuning/jobs: OpenAI's fine-tuning jobs are jobs here."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query

from core.api import openai_errors
from core.api.depends import ControlDep, Name
from core.api.openai_schemas import (
    FineTuningCheckpoint,
    FineTuningCreate,
    FineTuningEvent,
    FineTuningJob,
    Listed,
)
from core.control import openai_jobs as jobs

router = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["OpenAI-compatible"], responses=openai_errors.RESPONSES)
Limit = Annotated[int, Query(ge=1, le=100)]
After = Annotated[str | None, Query(max_length=120, description="id of the last one of the page before")]


@router.post("", summary="Create a fine-tuning job")
def create(
    control: ControlDep,
    body: FineTuningCreate,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
) -> FineTuningJob:
    """Checked before it is queued. What Harli cannot do as asked (a validation file, methods other than supervised,
    integrations) is refused."""
    return jobs.create(control, body, idempotency_key)


@router.get("", summary="List fine-tuning jobs")
def page(control: ControlDep, limit: Limit = 20, after: After = None) -> Listed[FineTuningJob]:
    """Newest first; jobs that came another way are among them."""
    return jobs.page(control, limit, after)


@router.get("/{job_id}", summary="Look at a fine-tuning job")
def get(control: ControlDep, job_id: Name) -> FineTuningJob:
    return jobs.get(control, job_id)


@router.post("/{job_id}/cancel", summary="Cancel a fine-tuning job")
def cancel(control: ControlDep, job_id: Name) -> FineTuningJob:
    """One that the engine runs is cancelled at its next step."""
    return jobs.cancel(control, job_id)


@router.post("/{job_id}/pause", summary="Pause a fine-tuning job")
def pause(control: ControlDep, job_id: Name) -> FineTuningJob:
    """One that the engine runs writes a checkpoint first."""
    return jobs.pause(control, job_id)


@router.post("/{job_id}/resume", summary="Resume a fine-tuning job")
def resume(control: ControlDep, job_id: Name) -> FineTuningJob:
    return jobs.resume(control, job_id)


@router.get("/{job_id}/events", summary="What happened to a fine-tuning job")
def events(control: ControlDep, job_id: Name, limit: Limit = 20, after: After = None) -> Listed[FineTuningEvent]:
    """Newest first: changes of state, and what the steps measured."""
    return jobs.events(control, job_id, limit, after)


@router.get("/{job_id}/checkpoints", summary="Checkpoints of a fine-tuning job")
def checkpoints(
    control: ControlDep, job_id: Name, limit: Limit = 10, after: After = None
) -> Listed[FineTuningCheckpoint]:
    """Newest first."""
    return jobs.checkpoints(control, job_id, limit, after)
