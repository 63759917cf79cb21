"""Bodies of the HTTP API. Times are UTC; durations carry their unit in the name.

An error is answered as ``{"error": {"code", "message", "param"}}`` with the status of the HarliError.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from core.api import methods

T = TypeVar("T")
NAME = r"^[a-z0-9][a-z0-9._-]{0,62}$"
_HALF = re.compile(r"[\ud800-\udfff]")
CLOCK_TIME = r"^([01][0-9]|2[0-3]):[0-5][0-9]$"
Weekday = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
WEEKDAYS: tuple[Weekday, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
JobState = Literal[
    "queued", "starting", "running", "paused", "saving", "succeeded", "failed", "cancelled", "interrupted"
]


def _no_number(value: Any) -> Any:
    """pydantic would take numbers for Unix times, which the description does not promise."""
    try:
        float(value)
    except (TypeError, ValueError):
        return value
    raise PydanticCustomError("moment", "write a time as ISO 8601 has it, such as 2026-01-31T12:00:00Z")


Moment = Annotated[AwareDatetime, Field(strict=False), BeforeValidator(_no_number)]


class Storable(BaseModel):
    """Python reads more out of a body than JSON has and a store takes: Infinity, NaN, halves of surrogate pairs. A
    field with one of these is refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _of_whole_characters(cls, value: Any) -> Any:
        left = [value]
        while left:
            part = left.pop()
            if isinstance(part, dict):
                left += [*part, *part.values()]
            elif isinstance(part, list):
                left += part
            elif isinstance(part, str) and _HALF.search(part):
                raise PydanticCustomError("characters", "it has half of a surrogate pair, give whole characters")
        return value


class Body(Storable):
    """Requests refuse unknown fields, so that a misspelt one is not silently ignored, and values of another type than
    the description names, such as 1 for true."""

    model_config = ConfigDict(strict=True)


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
    lengths: list[LengthBucket] = Field([], description="rows by length, each bucket twice as wide as the one before")
    length_unit: Literal["tokens", "bytes"] = "tokens"
    languages: dict[str, int] = Field({}, description="ISO 639-1 code (or other) → rows of a sample")
    content_sha256: str | None = Field(None, description="of the normalised rows, whatever format they came in")


class LengthBucket(BaseModel):
    """Rows longer than half of `up_to` and no longer than it."""

    up_to: int
    rows: int


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


class DatasetMessage(Message):
    """A message with what the OpenAI form has beside role and content; a weight of 0 keeps an answer from the loss."""

    tool_calls: list[dict[str, Any]] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    weight: int | None = None


class DatasetRow(BaseModel):
    index: int
    messages: list[DatasetMessage]
    tools: list[dict[str, Any]] | None = None


class DatasetColumn(BaseModel):
    """A column of a file that is looked at: its name, what its values are, the beginning of the first."""

    name: str
    kind: str
    example: str


class DatasetPreview(BaseModel):
    """How a file would be read, before it is uploaded. `format` is None while no shape fits its columns: then `columns`
    are to be mapped to `roles`. `faults` are the first of the rows that were looked at; `findings`, `languages` and
    `longest_row_tokens` are of those rows too, and of no others, however many the file has."""

    container: str
    format: str | None = None
    columns: list[DatasetColumn]
    mapping: dict[str, str] = Field({}, description="role → column, as it would be read")
    roles: list[str] = Field([], description="what a column can be mapped to")
    rows: list[DatasetRow]
    faults: list[str] = []
    looked_at: int = Field(0, description="rows that were looked at: the first of the file")
    whole: bool = Field(True, description="whether these are all of the file's rows")
    findings: list[Finding] = Field([], description="remarks that the upload's report will have, as far as can be told")
    languages: dict[str, int] = {}
    longest_row_tokens: int | None = Field(None, description="None without the served model's tokenizer")


class RenderedRow(BaseModel):
    """A row as the model's chat template writes it: its tokens, and which of them the loss counts."""

    index: int
    tokens: list[PackedToken]


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

    @model_validator(mode="before")
    @classmethod
    def _only_what_is_served(cls, given: Any) -> Any:
        """What peft can train and the engine cannot serve is refused with the reason, not as an unknown field."""
        return methods.plain_lora(given)


Preset = Literal["quick", "balanced", "thorough"]
Prompt = Annotated[str, Field(min_length=1, max_length=4000)]


class JobCreate(Body):
    """A finetuning job. Give `epochs` or `max_steps`, not both; neither means three epochs. `preset` fills in what is
    not given, by the size of the data set."""

    dataset: str = Field(description="name or id of a data set")
    preset: Preset | None = None
    adapter_name: str = Field(pattern=NAME, description="name under which the finished adapter is stored and served")
    name: str | None = Field(None, max_length=120)
    base_model: str | None = Field(
        None,
        max_length=255,
        description="another model than the served one, of those that the engine names (`GET /api/engine`): the "
        "adapter is stored with it, and not served",
    )
    initial_adapter: str | None = Field(None, description="adapter (name or name@version) to start from")
    lora: LoraBody = LoraBody()
    learning_rate: float = Field(1e-3, gt=0, le=1)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_ratio: float = Field(0.05, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    epochs: float | None = Field(None, gt=0, le=1000)
    max_steps: int | None = Field(None, gt=0, lt=2**31)
    micro_batch_tokens: int | None = Field(None, ge=32, le=65536)
    accumulation: int = Field(1, ge=1, le=1024)
    sequence_length: int | None = Field(None, ge=16, le=65536)
    seed: int = Field(0, ge=0, lt=2**31)
    evaluation_fraction: float = Field(0.05, ge=0, lt=0.9)
    evaluate_every: int = Field(0, ge=0, lt=2**31, description="steps between evaluations; 0: once at the end")
    checkpoint_every: int = Field(20, ge=1, lt=2**31)
    patience: int = Field(
        0, ge=0, le=1000, description="end after so many evaluations in a row without improvement; 0: never"
    )
    keep_best: bool = Field(False, description="store the adapter of the lowest evaluation loss, not of the last step")
    sample_prompts: list[Prompt] = Field(
        [], max_length=8, description="answered by the adapter at each evaluation, to look at while it trains"
    )
    sample_tokens: int = Field(64, ge=1, le=1024, description="most tokens of such an answer")
    priority: int = Field(0, ge=-100, le=100)
    deadline: Moment | None = Field(None, description="warn when the job will not have ended by then")
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
    best_step: int | None = Field(None, description="after which the evaluation loss was the lowest, `best_loss`")
    best_loss: float | None = None
    tokens: int = 0
    expected_tokens: int | None = Field(None, description="that it will train on in all, without padding")
    priority: int = 0
    deadline: datetime | None = None
    schedule_id: str | None = None
    resumes: int = 0
    error: ErrorDetail | None = None
    waiting_reason: str | None = Field(None, description="why a job that could run does not run now")


class JobStop(Body):
    save: bool = False


class JobPatch(Body):
    priority: int | None = Field(None, ge=-100, le=100)
    name: str | None = Field(None, max_length=120)
    deadline: Moment | None = None


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
    origin: Literal["trained", "imported", "merged"]
    job_id: str | None = None
    dataset_id: str | None = None
    dataset: str | None = Field(None, description="name@version of the data set, while there is one")
    base: str | None = Field(None, description="the model that it belongs to")
    parents: list[str] | None = Field(None, description="what a merged one was made of, as name@version*weight")
    rank: int
    alpha: float
    target_modules: list[str]
    bytes: int
    sha256: str


class AdapterAlias(BaseModel):
    """A name for one of the versions: the engine serves it as ``name@alias``. `history`: the versions that it stood for
    before, oldest first."""

    alias: str
    address: str
    wanted_version: int | None
    deployed_version: int | None = None
    deployment: Literal["none", "loading", "deployed", "unloading", "failed"] = "none"
    error: ErrorDetail | None = None
    history: list[int] = []
    updated_at: datetime


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
    aliases: list[AdapterAlias] = []


class AdapterDeploy(Body):
    version: int | None = Field(None, ge=1, description="None: the newest")


class AdapterPart(Body):
    """One of the adapters that are merged: ``name``, ``name@version`` or ``name@alias``, and its weight in the sum."""

    adapter: str = Field(max_length=120)
    weight: float = Field(1.0, ge=-10, le=10)


class AdapterMerge(Body):
    parts: list[AdapterPart] = Field(min_length=2, max_length=8)


class OperationError(ErrorDetail):
    """Why it failed: the error that a request which had waited for it would have been answered with, `status` and, of
    a file that cannot be trained on, `report` included."""

    status: int = 500
    report: DatasetReport | None = None


class Operation(BaseModel):
    """Work that goes on after a request, or that a long one is busy with: `done` of `total` bytes. `result`: the id of
    the data set that a check came to, the file's name of a merged model."""

    id: str
    kind: Literal["dataset", "merge"]
    subject: str
    state: Literal["running", "succeeded", "failed", "cancelled"]
    done: int = 0
    total: int = 0
    error: OperationError | None = None
    result: str | None = None
    created_at: datetime
    updated_at: datetime


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
    ms: float = Field(gt=0, le=600_000)
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


class BaseModelInfo(BaseModel):
    """A model other than the served one that jobs may finetune: `window_layers` of its layers are on the device at a
    time, with embedding and head in `window_bytes`, and all of it in the engine's host memory while a job runs.
    `refused`: why it cannot be had."""

    name: str
    parameters: int = 0
    layers: int = 0
    window_layers: int = 0
    window_bytes: int = 0
    host_bytes: int = 0
    refused: str | None = None


class Engine(BaseModel):
    """The engine as it last reported itself; `state` is ``absent`` until it first has and ``lost`` when
    it fell silent."""

    state: Literal["absent", "ready", "lost"]
    id: str | None = None
    pid: int | None = Field(None, description="of its scheduler's process, on its machine")
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
    base_models: list[BaseModelInfo] = Field([], description="that jobs may finetune beside the served one")
    policy: str = ""
    margin: float = Field(0.0, description="share of a target that is never planned with")
    settings: dict[str, str] = Field({}, description="what it runs with, for people")
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
    memory_bytes: int | None = Field(None, description="resident memory of the part and its children, here")


class MemoryOwner(BaseModel):
    """What one owner (the KV cache, a job) has of the arena, and the most it ever had; bytes."""

    name: str
    bytes: int
    high_water_bytes: int


class Memory(BaseModel):
    """The arena that KV cache and finetuning share. `kept_bytes`: free, and ready to be mapped; `kv_tokens`: slots that
    requests may hold now, of `kv_most_tokens`; `reclaims`: how often finetuning gave memory up for the KV cache since
    the engine's start; `reclaim_ms`: how long that took the last time, from when the first request had to wait for it,
    or from the decision where none had to, until finetuning's pages were free."""

    page_bytes: int
    capacity_bytes: int
    used_bytes: int
    high_water_bytes: int
    kept_bytes: int
    kv_tokens: int
    kv_most_tokens: int
    owners: list[MemoryOwner] = []
    reclaims: int = 0
    reclaim_ms: float | None = None


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
    power_w: float | None = Field(None, description="what the GPU drew, watts; None where that is not told")
    plan: str = ""
    plan_after: float = 0.0
    plan_beside: float = 0.0
    plan_reason: str = ""
    paused_reason: str | None = None
    memory: Memory | None = Field(None, description="None: KV cache and finetuning have memory of their own")
    target_ms: float | None = Field(None, description="the tightest ITL target of everyone, at the end")
    guard_pauses: int = 0
    guarded_share: float = Field(0.0, description="share of the time in which the guard held finetuning back")
    tenant_attainment: dict[str, float] = Field(
        {}, description="share of gaps within its own ITL target, of each tenant that has one"
    )


class FrontierPoint(BaseModel):
    """What a target costs and gives. ITL: None where nothing decodes; layout: the one that most steps ran in."""

    target_ms: float
    finetune_tokens_s: float
    exclusive_share: float
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    attainment: float
    layout: str


class Frontier(BaseModel):
    """Finetune throughput against the ITL target at the present load, simulated with the engine's own policy and
    predictor. `source`: the profile that was measured on this machine; what the engine has learnt of itself while it
    served (`learnt`); or none, and `missing` says what is lacking."""

    source: Literal["profile", "learnt", "none"]
    missing: str | None = None
    measured_at: datetime | None = None
    policy: str = ""
    margin: float = 0.0
    batch: int = 0
    kv_tokens: int = 0
    solo_ms: float | None = None
    exclusive_tokens_s: float | None = None
    points: list[FrontierPoint] = []
    now: FrontierPoint | None = None
    notes: list[str] = []


AlertMetric = Literal[
    "attainment", "itl_p99_ms", "stall_p99_ms", "ttft_p99_ms", "guarded_share", "finetune_tokens_s", "kv_used_share",
    "waiting_requests", "queued_jobs", "longest_wait_s", "engine_ready", "parts_down",
]  # fmt: skip


class AlertRuleBody(Body):
    """An alert fires when the figure is above (below) the threshold for `for_s` seconds. Figures of latency and
    throughput are of the last `window_s` seconds, the others of the moment; without a figure nothing holds."""

    metric: AlertMetric
    comparison: Literal["above", "below"]
    threshold: float
    window_s: float = Field(60.0, ge=5, le=600)
    for_s: float = Field(60.0, ge=0, le=86_400)
    severity: Literal["info", "warning", "critical"] = "warning"
    enabled: bool = True


class AlertRule(AlertRuleBody):
    name: str
    updated_at: datetime


class Alert(BaseModel):
    """One time that a rule's condition held. pending: not long enough yet; resolved: it does not any more. `value` is
    the figure when the state changed last."""

    id: int
    rule: str
    severity: Literal["info", "warning", "critical"]
    state: Literal["pending", "firing", "resolved"]
    value: float | None = None
    message: str
    began_at: datetime
    fired_at: datetime | None = None
    resolved_at: datetime | None = None


class Live(BaseModel):
    """The last minute summed up, for a dashboard's figures."""

    engine: Engine
    targets: Targets
    window_s: float
    now: TelemetryPoint | None = None
    window: TelemetryPoint | None = None
    jobs: dict[str, int] = Field({}, description="jobs per state")
    parts: list[Part] = []
    alerts: list[Alert] = Field([], description="those that are pending or firing")


class Event(BaseModel):
    """A server-sent event: `topic` is jobs, datasets, adapters, targets, engine, alerts or telemetry."""

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


class DoctorFinding(BaseModel):
    """One thing that `harli doctor` looked at. level: ok; note (worth knowing); missing (Harli does not run without
    it)."""

    topic: str
    level: Literal["ok", "note", "missing"]
    value: str
    remedy: str = ""


class Doctor(BaseModel):
    """What the machine of the API has, what will be used of it and what is missing."""

    ok: bool
    at: datetime
    findings: list[DoctorFinding]


class Health(BaseModel):
    """This API process: whether it is the one that dispatches jobs, and what an upload may weigh."""

    status: Literal["ok"] = "ok"
    version: str
    database: str
    dispatcher: bool
    max_upload_bytes: int
