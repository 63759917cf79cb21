"""Bodies of the routes around jobs: estimates, the queue, samples, comparisons, schedules, webhooks, quotas."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import AnyHttpUrl, BaseModel, Field

from core.api.schemas import NAME, Body, Job, JobCreate, JobMetric

MOST_COMPARED = 12
"""Jobs side by side."""

# ---- before a job ----------------------------------------------------------------------------------------------------


class MemoryEstimate(BaseModel):
    """`fits` is None where it is not known; `reason` says what was compared, or why nothing could be."""

    fits: bool | None
    needed_bytes: int | None = None
    free_bytes: int | None = None
    reason: str


class Speed(BaseModel):
    """Finetune tokens per second (padding not counted) as the engine reported them: over `seconds` up to
    `measured_at`, while a job was there; `alone_tokens_s` those of the seconds in which nothing decoded."""

    tokens_s: float
    seconds: float
    measured_at: datetime
    alone_tokens_s: float | None = None


class JobEstimate(BaseModel):
    """What a job would take. `spec` has every default and the preset filled in. `speed` is None until something was
    measured, and with it everything in seconds; `wait_s` is what the jobs before it have left."""

    spec: JobCreate
    rows: int
    training_rows: int
    longest_row_tokens: int | None = None
    steps: int | None = Field(None, description="optimizer steps, unless it stops early")
    micro_batches: int | None = None
    evaluations: int | None = None
    tokens: int | None = Field(None, description="that it trains on, padding not counted: what is charged for")
    padding_share: float | None = None
    speed: Speed | None = None
    seconds_per_step: float | None = None
    seconds: float | None = None
    wait_s: float | None = None
    eta: datetime | None = None
    memory: MemoryEstimate
    notes: list[str] = Field([], description="what is not known yet and why, and what to look out for")


class JobClone(Body):
    """`changes` are fields of a `JobCreate`, in `lora` too; what is not named is the old job's, its version of the data
    set included."""

    changes: dict[str, Any] = Field(default_factory=dict)


# ---- in the queue ----------------------------------------------------------------------------------------------------


class JobMove(Body):
    """One place up or down, or to an end, among the waiting jobs that the caller sees. Their places, priorities
    included, are dealt out anew in the new order, so that nothing changes for other jobs."""

    to: Literal["up", "down", "top", "bottom"]


class JobAhead(BaseModel):
    """A job that goes before; `id` and `name` only where they are the caller's to see."""

    id: str | None = None
    name: str | None = None
    state: str
    seconds_left: float | None = None


class JobOutlook(BaseModel):
    """Why a job is where it is, and when it will be through. `reasons` are sentences, the most important one first."""

    job_id: str
    state: str
    headline: str
    reasons: list[str] = []
    position: int | None = None
    ahead: list[JobAhead] = []
    speed: Speed | None = None
    seconds_left: float | None = Field(None, description="of its own training, without waiting")
    eta: datetime | None = None
    deadline: datetime | None = None
    late: bool = Field(False, description="the ETA passes the deadline")


class JobSample(BaseModel):
    """What the adapter, as it was after a step, answered to one of the job's prompts."""

    step: int
    number: int
    time: datetime
    prompt: str
    answer: str
    tokens: int | None = None


class JobComparison(BaseModel):
    """Jobs side by side: `differing` has what they were asked with differently, by field (``lora.rank``), a value per
    job; `metrics` each job's figures, at most about a thousand steps of them."""

    jobs: list[Job]
    differing: dict[str, list[Any]]
    metrics: dict[str, list[JobMetric]]


# ---- schedules -------------------------------------------------------------------------------------------------------


class ScheduleCreate(Body):
    """A job that is submitted by cron. Each run takes the newest version of the data set."""

    name: str = Field(min_length=1, max_length=120)
    cron: str = Field(max_length=120, description="minute hour day month weekday, such as `0 2 * * *`")
    timezone: str = Field("UTC", max_length=64)
    job: JobCreate
    continued: bool = Field(False, description="start each run from the adapter's newest version, once there is one")
    only_new_data: bool = Field(False, description="leave a run out when the data set has no newer version")
    enabled: bool = True


class SchedulePatch(Body):
    name: str | None = Field(None, min_length=1, max_length=120)
    cron: str | None = Field(None, max_length=120)
    timezone: str | None = Field(None, max_length=64)
    job: JobCreate | None = None
    continued: bool | None = None
    only_new_data: bool | None = None
    enabled: bool | None = None


class Schedule(BaseModel):
    """`last_message` says how the last run went: which job it made, or why none."""

    id: str
    tenant: str
    name: str
    cron: str
    timezone: str
    job: JobCreate
    continued: bool
    only_new_data: bool
    enabled: bool
    created_at: datetime
    next_run_at: datetime | None = None
    last_run_at: datetime | None = None
    last_job_id: str | None = None
    last_message: str | None = None


# ---- webhooks --------------------------------------------------------------------------------------------------------

WebhookEvent = Literal[
    "job.submitted", "job.running", "job.paused", "job.interrupted", "job.stopped_early", "job.deadline_at_risk",
    "job.succeeded", "job.failed", "job.cancelled", "alert.firing", "alert.resolved", "webhook.test",
]  # fmt: skip


class WebhookCreate(Body):
    """Where to send events: of all jobs of the tenant or of one; `events` empty: all."""

    url: AnyHttpUrl = Field(max_length=2048)
    events: list[WebhookEvent] = Field([], max_length=16)
    job_id: str | None = Field(None, max_length=40)


class WebhookPatch(Body):
    events: list[WebhookEvent] | None = Field(None, max_length=16)
    enabled: bool | None = None


class Webhook(BaseModel):
    id: str
    tenant: str
    url: str
    events: list[str]
    job_id: str | None = None
    enabled: bool
    created_at: datetime


class WebhookWithSecret(Webhook):
    """Answered once, when it is made. `secret` signs as the Standard Webhooks specification says: header
    ``webhook-signature`` is ``v1,`` and the base64 of HMAC-SHA256 over ``id.timestamp.body``, keyed with what follows
    ``whsec_``, decoded from base64."""

    secret: str


class Delivery(BaseModel):
    """One event on its way. A pending one is tried (again) at `next_at`."""

    id: int
    event_id: str
    event: str
    created_at: datetime
    status: Literal["pending", "delivered", "failed"]
    attempts: int
    next_at: datetime | None = None
    delivered_at: datetime | None = None
    response_status: int | None = None
    error: str | None = None


# ---- quotas ----------------------------------------------------------------------------------------------------------


class QuotaUpdate(Body):
    """Limits of a tenant; None: none, but for `max_priority`."""

    finetune_tokens_day: int | None = Field(None, ge=0, le=10**15)
    running_jobs: int | None = Field(None, ge=0, le=1000)
    waiting_jobs: int | None = Field(None, ge=0, le=100_000)
    max_priority: int | None = Field(
        None, ge=-100, le=100, description="that its jobs may be given; None: 0, and any for the platform's own tenant"
    )


class Quota(BaseModel):
    """A tenant's limits and what it uses of them now; the day ends at midnight UTC."""

    tenant: str = Field(pattern=NAME)
    finetune_tokens_day: int | None = None
    running_jobs: int | None = None
    waiting_jobs: int | None = None
    max_priority: int = 0
    tokens_today: int
    running_now: int
    waiting_now: int
