"""Jobs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query, Response
from pydantic import BaseModel

from core.api import schemas
from core.api.answers import Shared
from core.api.depends import After, AnswerKey, AnswersDep, ControlDep, Cursor, Limit, Name
from core.api.job_schemas import (
    MOST_COMPARED,
    JobClone,
    JobComparison,
    JobEstimate,
    JobMove,
    JobOutlook,
    JobSample,
)
from core.control import comparison, jobs, outlook, queue

router = APIRouter(prefix="/jobs", tags=["jobs"])
Rows = Annotated[int, Query(ge=1, le=10_000)]


class _Page(BaseModel):
    state: schemas.JobState | None = None
    limit: Limit = 100
    cursor: Cursor = None


PAGE = Shared(
    _Page,
    lambda control, asked: jobs.page_json(control, asked.limit, asked.cursor, asked.state),
    # With the reasons why jobs wait.
    frozenset({"jobs", "engines", "quotas"}),
)


@router.post(
    "",
    status_code=201,
    summary="Submit a job",
    responses={200: {"model": schemas.Job, "description": "The Idempotency-Key came before; this is its job"}},
)
def create(
    response: Response,
    control: ControlDep,
    job: schemas.JobCreate,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
) -> schemas.Job:
    """Checked before it is queued: data set, adapter, lengths, what the engine can serve. With an Idempotency-Key, a
    second press within a day is the first one's job."""
    found, new = jobs.submit(control, job, idempotency_key)
    response.status_code = 201 if new else 200
    return found


@router.get("", summary="List jobs", response_model=schemas.Page[schemas.Job])
async def page(
    control: ControlDep,
    answers: AnswersDep,
    key: AnswerKey,
    asked: Annotated[_Page, Query()],
) -> Response:
    """Newest first, of one state or all."""
    return await answers.get(key, lambda: PAGE.make(control, asked), PAGE.tables)


@router.post("/estimate", summary="What a job would take")
def estimate(control: ControlDep, job: schemas.JobCreate) -> JobEstimate:
    """Nothing is queued. Refused for what submitting would be refused for; what is not known yet is left out, and
    `notes` say why."""
    return jobs.estimate(control, job)


@router.get("/queue", summary="The order in which jobs run")
def in_order(control: ControlDep, limit: Limit = 100) -> list[schemas.Job]:
    """The one that runs, then the first waiting ones as they will be handed out."""
    return queue.order(control, limit)


@router.get("/compare", summary="Jobs side by side")
def compare(
    control: ControlDep,
    job_id: Annotated[list[str], Query(min_length=2, max_length=MOST_COMPARED, description="given once for each job")],
) -> JobComparison:
    """What they were asked with differently, and their figures."""
    return comparison.compare(control, job_id)


@router.get("/{job_id}", summary="Look at a job")
def get(control: ControlDep, job_id: Name) -> schemas.Job:
    return jobs.get(control, job_id)


@router.get("/{job_id}/events", summary="What happened to a job")
def events(control: ControlDep, job_id: Name, after: After = 0, limit: Rows = 1000) -> list[schemas.JobEvent]:
    """Every transition and remark, oldest first."""
    return jobs.events(control, job_id, after, limit)


@router.get("/{job_id}/metrics", summary="A job's figures per step")
def metrics(
    control: ControlDep,
    job_id: Name,
    after: Annotated[int, Query(ge=-1, lt=2**31, description="only steps above this")] = -1,
    limit: Rows = 10_000,
) -> list[schemas.JobMetric]:
    """In order of steps."""
    return jobs.metrics(control, job_id, after, limit)


@router.get("/{job_id}/log", summary="A job's log")
def log(control: ControlDep, job_id: Name, after: After = 0, limit: Rows = 1000) -> list[schemas.JobLogLine]:
    """Oldest first."""
    return jobs.log(control, job_id, after, limit)


@router.post("/{job_id}/pause", summary="Pause a job")
def pause(control: ControlDep, job_id: Name) -> schemas.Job:
    """One that the engine runs writes a checkpoint first; one that waits is paused at once."""
    return jobs.pause(control, job_id)


@router.post("/{job_id}/resume", summary="Resume a job")
def resume(control: ControlDep, job_id: Name) -> schemas.Job:
    """A paused or interrupted one goes back to its place in the queue, and on from its newest checkpoint."""
    return jobs.resume(control, job_id)


@router.post("/{job_id}/stop", summary="Stop a job")
def stop(control: ControlDep, job_id: Name, body: schemas.JobStop | None = None) -> schemas.Job:
    """With `save` its adapter is stored as it stands and the job succeeds, without the job is cancelled."""
    return jobs.stop(control, job_id, body.save if body is not None else False)


@router.get("/{job_id}/why", summary="Why a job waits or is slow, and when it ends")
def why(control: ControlDep, job_id: Name) -> JobOutlook:
    """In words, from the queue, the engine's reports, quotas and the measured speed."""
    return outlook.of(control, job_id)


@router.get("/{job_id}/samples", summary="What a job's adapter answered on the way")
def samples(control: ControlDep, job_id: Name) -> list[JobSample]:
    """Of each evaluated step, the answers to the job's `sample_prompts`."""
    return jobs.samples(control, job_id)


@router.post(
    "/{job_id}/clone",
    status_code=201,
    summary="Submit a job once more",
    responses={200: {"model": schemas.Job, "description": "The Idempotency-Key came before; this is its job"}},
)
def clone(
    response: Response,
    control: ControlDep,
    job_id: Name,
    body: JobClone | None = None,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
) -> schemas.Job:
    """With some fields changed; the version of the data set is the old job's unless another is named."""
    found, new = jobs.clone(control, job_id, body.changes if body is not None else {}, idempotency_key)
    response.status_code = 201 if new else 200
    return found


@router.post("/{job_id}/move", summary="Move a waiting job in the queue")
def move(control: ControlDep, job_id: Name, body: JobMove) -> schemas.Job:
    """One place up or down, or to an end, among the waiting jobs that the caller sees."""
    return queue.move(control, job_id, body.to)


@router.delete("/{job_id}", status_code=204, summary="Forget a job", response_class=Response)
def delete(control: ControlDep, job_id: Name) -> None:
    """One that has ended, with its events, figures and checkpoints. The adapter that it made stays."""
    jobs.delete(control, job_id)


@router.patch("/{job_id}", summary="Change a job's name, priority or deadline")
def patch(control: ControlDep, job_id: Name, body: schemas.JobPatch) -> schemas.Job:
    return jobs.update(control, job_id, body)
