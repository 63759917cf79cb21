"""Bodies of the HTTP API. Times are UTC; durations carry their unit in the name.

An error is answered as ``{"error": {"code", "message", "param"}}`` with the status of the HarliError.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

T = TypeVar("T")
NAME = r"^[a-z0-9][a-z0-9._-]{0,62}$"
CLOCK_TIME = r"^([01][0-9]|2[0-3]):[0-5][0-9]$"
Weekday = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
WEEKDAYS: tuple[Weekday, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
JobState = Literal[
    "queued", "starting", "running", "paused", "saving", "succeeded", "failed", "cancelled", "interrupted"
]


class Body(BaseModel):
    """Requests refuse unknown fields, so that a misspelt one is not silently ignored."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetail(BaseModel):
    """One fault: a stable word for programs, a sentence for people, the field at fault."""

    code: str
    message: str
    param: str | None = None


class ErrorBody(BaseModel):
    """`report` is there when an uploaded file was refused for what is in it."""

    error: ErrorDetail
    report: DatasetReport | None = None


class Page(BaseModel, Generic[T]):
    """A page of a listing; `next` is the cursor of the following one, None at the end."""

    items: list[T]
    next: str | None = None


# ---- data sets -------------------------------------------------------------------------------------------------------


class Finding(BaseModel):
    """One kind of fault or remark found in a file: how often, and the first places as ``line N: what``."""

    code: str
    level: Literal["error", "warning"]
    message: str
    count: int
    examples: list[str] = []


class DatasetReport(BaseModel):
    """What the validator saw. Token figures need the served model's tokenizer and are None without one."""

    format: str
    columns: dict[str, str] = Field({}, description="role → column of the file")
    rows: int
    rows_read: int
    findings: list[Finding] = []
    tokens: int | None = None
    answer_tokens: int | None = None
    longest_row_tokens: int | None = None
    mean_row_tokens: float | None = None


class Dataset(BaseModel):
    id: str
    tenant: str = "default"
    name: str
    version: int
    created_at: datetime
    bytes: int
    sha256: str
    report: DatasetReport


class Message(BaseModel):
    role: str
    content: str


class DatasetRow(BaseModel):
    index: int
    messages: list[Message]


class PackedToken(BaseModel):
    """A token of the packed batch: its text, the row (segment) it belongs to, whether the loss counts it."""

    text: str
    segment: int
    trained: bool


class PackedPreview(BaseModel):
    """The first micro-batch exactly as training will see it."""

    micro_batch_tokens: int
    segments: int
    padding: int
    trained_tokens: int
    micro_batches_per_epoch: int
    tokens: list[PackedToken]


# ---- jobs ------------------------------------------------------------------------------------------------------------


class LoraBody(Body):
    rank: int = Field(8, ge=1, le=256)
    alpha: float = Field(16.0, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    target_modules: list[str] = Field(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], min_length=1
    )
    use_rslora: bool = False


class JobCreate(Body):
    """A finetuning job. Give `epochs` or `max_steps`, not both; neither means three epochs."""

    dataset: str = Field(description="name or id of a data set")
    adapter_name: str = Field(pattern=NAME, description="name under which the finished adapter is stored and served")
    name: str | None = Field(None, max_length=120)
    initial_adapter: str | None = Field(None, description="adapter (name or name@version) to start from")
    lora: LoraBody = LoraBody()
    learning_rate: float = Field(1e-3, gt=0, le=1)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_ratio: float = Field(0.05, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    epochs: float | None = Field(None, gt=0, le=1000)
    max_steps: int | None = Field(None, gt=0)
    micro_batch_tokens: int | None = Field(None, ge=32, le=65536)
    accumulation: int = Field(1, ge=1, le=1024)
    sequence_length: int | None = Field(None, ge=16, le=65536)
    seed: int = Field(0, ge=0, lt=2**31)
    evaluation_fraction: float = Field(0.05, ge=0, lt=0.9)
    evaluate_every: int = Field(0, ge=0, description="steps between evaluations; 0: once at the end")
    checkpoint_every: int = Field(20, ge=1)
    priority: int = Field(0, ge=-100, le=100)
    deploy: bool = Field(True, description="load the finished adapter into the engine")


class Job(BaseModel):
    id: str
    tenant: str = "default"
    name: str
    state: JobState
    spec: JobCreate
    dataset_id: str
    dataset_name: str
    adapter_name: str
    adapter_version: int | None = None
    created_at: datetime
    started_at: datetime | None = None
    ended_at: datetime | None = None
    step: int = 0
    total_steps: int | None = None
    epoch: float | None = None
    loss: float | None = None
    first_loss: float | None = None
    eval_loss: float | None = None
    tokens: int = 0
    priority: int = 0
    resumes: int = 0
    error: ErrorDetail | None = None
    waiting_reason: str | None = Field(None, description="why a job that could run does not run now")


class JobStop(Body):
    save: bool = False


class JobPatch(Body):
    priority: int | None = Field(None, ge=-100, le=100)
    name: str | None = Field(None, max_length=120)


class JobEvent(BaseModel):
    id: int
    job_id: str
    time: datetime
    kind: str
    from_state: JobState | None = None
    to_state: JobState | None = None
    message: str = ""


class JobMetric(BaseModel):
    step: int
    time: datetime
    loss: float | None = None
    eval_loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    tokens: int | None = None


# ---- adapters --------------------------------------------------------------------------------------------------------


class AdapterVersion(BaseModel):
    version: int
    created_at: datetime
    origin: Literal["trained", "uploaded"]
    job_id: str | None = None
    dataset_id: str | None = None
    rank: int
    alpha: float
    target_modules: list[str]
    bytes: int
    sha256: str


class Adapter(BaseModel):
    """`deployed_version` is the one the engine serves under `name` now; `deployment` says how that stands."""

    name: str
    tenant: str = "default"
    created_at: datetime
    versions: list[AdapterVersion]
    deployed_version: int | None = None
    wanted_version: int | None = None
    deployment: Literal["none", "loading", "deployed", "unloading", "failed"] = "none"
    error: ErrorDetail | None = None


class AdapterDeploy(Body):
    version: int | None = Field(None, ge=1, description="None: the newest")


# ---- targets, engine, telemetry --------------------------------------------------------------------------------------


class TargetWindow(Body):
    """A part of every week, by the clocks of a zone. An `end` at or before `start` is on the next day."""

    days: list[Weekday] = Field(list(WEEKDAYS), min_length=1, max_length=7)
    start: str = Field("00:00", pattern=CLOCK_TIME, description="HH:MM")
    end: str = Field("00:00", pattern=CLOCK_TIME, description="HH:MM")
    zone: str = Field("UTC", max_length=64, description="a name of the time zone database, such as Europe/Berlin")


class TargetBody(Body):
    """The `quantile` of `kind` stays under `ms`: for the requests of `tenant`'s adapters, or of everyone whose tenant
    has no target of that kind; always, or while one of `windows` is open. Of targets of the same tenant, kind and
    quantile those with an open window go before the one without windows, and of these the tightest."""

    kind: Literal["itl", "tpot", "ttft"]
    ms: float = Field(gt=0, le=600_000, allow_inf_nan=False)
    quantile: float = Field(0.99, gt=0, lt=1)
    tenant: str | None = Field(None, pattern=NAME)
    windows: list[TargetWindow] = Field([], max_length=8)


class TargetInForce(BaseModel):
    """A target that the engine is to obey at this moment, why it and no other, and when that changes next."""

    kind: Literal["itl", "tpot", "ttft"]
    ms: float
    quantile: float
    tenant: str | None = None
    reason: str
    until: datetime | None = None


class TargetsUpdate(Body):
    """`version` is the one that was read; a newer one in the store answers 409 with the current targets."""

    version: int = Field(ge=0)
    targets: list[TargetBody] = Field(max_length=64)


class Targets(BaseModel):
    """`origin` is ``measured`` while the default (a multiple of the solo ITL measured at start) is in force.
    `applied_version` is the version the engine plans with. `targets` is all that was set, `in_force` what of it counts
    at this moment."""

    version: int
    targets: list[TargetBody]
    in_force: list[TargetInForce] = []
    updated_at: datetime | None = None
    origin: Literal["measured", "set", "none"]
    applied_version: int | None = None


class Notice(BaseModel):
    """Something about the engine that people should see: the guard's reason when it acts, other targets in force, a
    fallback and its reason, a refused command. `id` grows."""

    id: int
    time: datetime
    level: Literal["info", "warning", "error"]
    code: str
    message: str


class Engine(BaseModel):
    """The engine as it last reported itself; `state` is ``absent`` until it first has and ``lost`` when
    it fell silent."""

    state: Literal["absent", "ready", "lost"]
    id: str | None = None
    http_url: str | None = None
    model: str | None = None
    model_path: str | None = None
    device: str | None = None
    device_name: str | None = None
    dtype: str | None = None
    parameters: int | None = None
    versions: dict[str, str] = {}
    max_lora_rank: int | None = None
    lora_modules: list[str] = []
    kv_tokens: int | None = None
    max_running_requests: int | None = None
    partitions: list[str] = []
    solo_itl_ms: float | None = None
    running_job: str | None = None
    since: datetime | None = None
    notices: list[Notice] = Field([], description="the last twenty, oldest first; /api/notices has all")


class Part(BaseModel):
    """A supervised process."""

    name: Literal["api", "engine", "console", "demo"]
    state: Literal["starting", "ready", "backing_off", "stopped", "failed"]
    pid: int | None = None
    url: str | None = None
    restarts: int = 0
    message: str = ""
    since: datetime


class TelemetryPoint(BaseModel):
    """One second (or, further back, one aggregate). Percentiles are of the raw values of the interval; None without
    any."""

    time: datetime
    interval_s: float
    itl_p50_ms: float | None = None
    itl_p99_ms: float | None = None
    stall_p99_ms: float | None = None
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None
    tpot_p50_ms: float | None = None
    tpot_p99_ms: float | None = None
    attainment: float | None = Field(None, description="share of gaps within the tightest ITL target")
    decode_tokens_s: float = 0.0
    finetune_tokens_s: float = 0.0
    batch: float = 0.0
    running: int = 0
    waiting: int = 0
    kv_used: int = 0
    kv_total: int = 0
    busy_share: float = 0.0
    decode_share: float = 0.0
    finetune_share: float = 0.0
    memory_bytes: int = 0
    plan: str = ""
    plan_after: float = 0.0
    plan_beside: float = 0.0
    plan_reason: str = ""
    paused_reason: str | None = None
    guard_pauses: int = 0
    guarded_share: float = Field(0.0, description="share of the time in which the guard held finetuning back")
    tenant_attainment: dict[str, float] = Field(
        {}, description="share of gaps within its own ITL target, of each tenant that has one"
    )


class Live(BaseModel):
    """The last minute summed up, for a dashboard's figures."""

    engine: Engine
    targets: Targets
    window_s: float
    now: TelemetryPoint | None = None
    window: TelemetryPoint | None = None
    jobs: dict[str, int] = Field({}, description="jobs per state")
    parts: list[Part] = []


class Event(BaseModel):
    """A server-sent event: `topic` is jobs, datasets, adapters, targets, engine or telemetry."""

    topic: str
    kind: str
    id: str | None = None
    time: datetime
    data: dict[str, Any] = {}


# ---- the rest --------------------------------------------------------------------------------------------------------


class JobLogLine(BaseModel):
    """A line of a job's log; `id` grows, so that a reader asks for what came after the last one it has."""

    id: int
    time: datetime
    message: str


class NameCheck(BaseModel):
    """Whether a name can be given to something new, asked before its upload starts; `reason` says why not."""

    name: str
    available: bool
    reason: str | None = None


class Health(BaseModel):
    """This API process: whether it is the one that dispatches jobs, and what an upload may weigh."""

    status: Literal["ok"] = "ok"
    version: str
    database: str
    dispatcher: bool
    max_upload_bytes: int
