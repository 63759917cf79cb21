"""Messages of the engine link. Frozen msgspec structs, msgpack on the wire, told apart by their class name.

The engine speaks first (`Hello`), the control plane answers with `SetTargets` and commands; the engine reports with
`Telemetry`, `JobUpdate` and `EngineNotice`. Every command about a job carries the fencing token of the lease under
which the job was handed out; the engine repeats it, and the control plane drops what comes under an older one.
"""

from __future__ import annotations

from typing import Literal

import msgspec

PROTOCOL = 1


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of everything on the wire."""


# ---- shared values ---------------------------------------------------------------------------------------------------


class LoraSpec(msgspec.Struct, frozen=True, kw_only=True):
    """LoRA shape; `target_modules` are leaf names such as ``q_proj``."""

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    use_rslora: bool = False


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One finetuning job as the engine sees it. Paths are on the engine's file system.

    Exactly one of `epochs` and `max_steps` is set. A step is one optimizer step of `accumulation` micro-batches, each
    packed to `micro_batch_tokens` tokens. `evaluation_fraction` of the rows is held out. `patience`: evaluations in a
    row without improvement after which the job ends (0: never); `keep_best`: the adapter that is saved is that of the
    lowest evaluation loss; `sample`: the adapter of every evaluation is written, for the control plane to try.
    `base_model`: the name of another model than the served one, out of those that the engine's hello names.
    """

    job_id: str
    tenant: str = "default"
    base_model: str | None = None
    dataset_path: str
    adapter_name: str
    output_dir: str
    initial_adapter: str | None = None
    lora: LoraSpec = LoraSpec()
    learning_rate: float = 1e-3
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_ratio: float = 0.05
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    epochs: float | None = 3.0
    max_steps: int | None = None
    micro_batch_tokens: int = 256
    accumulation: int = 1
    sequence_length: int = 256
    seed: int = 0
    evaluation_fraction: float = 0.05
    evaluate_every: int = 0
    checkpoint_every: int = 20
    patience: int = 0
    keep_best: bool = False
    sample: bool = False
    priority: int = 0


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A latency target: the `quantile` of `kind` stays under `ms`, for the requests of `tenant` (None: of everyone
    whose tenant has no target of that kind)."""

    kind: Literal["itl", "tpot", "ttft"]
    ms: float
    quantile: float = 0.99
    tenant: str | None = None


class PlanView(msgspec.Struct, frozen=True, kw_only=True):
    """The plan in force, for people: `after`/`beside` are means per decode step of the reporting interval."""

    policy: str
    layout: str = "whole"
    beside: float = 0.0
    after: float = 0.0
    reason: str = ""


class MemoryOwner(msgspec.Struct, frozen=True):
    """What one owner has of the arena's memory, and the most it ever had; bytes."""

    name: str
    bytes: int
    high_water_bytes: int


class MemoryView(msgspec.Struct, frozen=True, kw_only=True):
    """The arena that KV cache and finetuning share. `kept_bytes`: free, and ready to be mapped; `kv_tokens`: slots that
    requests may hold now, of `kv_most_tokens`; `reclaims`: how often finetuning gave memory up for the KV cache so far;
    `reclaim_ms`: how long that took the last time, from when the first request had to wait for it, or from the decision
    where none had to, until finetuning's pages were free."""

    page_bytes: int
    capacity_bytes: int
    used_bytes: int
    high_water_bytes: int
    kept_bytes: int
    kv_tokens: int
    kv_most_tokens: int
    owners: tuple[MemoryOwner, ...] = ()
    reclaims: int = 0
    reclaim_ms: float | None = None


# ---- engine → control ------------------------------------------------------------------------------------------------


class BaseModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model other than the served one that jobs may finetune, `window_layers` of its layers on the device at a time.
    `path`: its folder on the engine's file system; `refused`: why it cannot be had, in words."""

    name: str
    path: str
    parameters: int = 0
    layers: int = 0
    window_layers: int = 0
    window_bytes: int = 0
    host_bytes: int = 0
    refused: str | None = None


class Hello(Message, frozen=True, kw_only=True, tag=True):
    """Sent when the engine is ready, and again after each reconnection of the link. `settings`: what it runs with, for
    people. `base_models`: those that jobs may name. `finetune_slot`: (largest rank, micro-batch tokens) of the
    finetuning that was captured at the start; None where tasklets run eagerly."""

    engine_id: str
    protocol: int = PROTOCOL
    pid: int
    http_url: str
    model: str
    model_path: str
    device: str
    device_name: str
    dtype: str
    parameters: int
    versions: dict[str, str]
    max_lora_rank: int
    lora_modules: tuple[str, ...]
    kv_tokens: int
    max_running_requests: int
    partitions: tuple[str, ...]
    finetune_slot: tuple[int, int] | None = None
    base_models: tuple[BaseModel, ...] = ()
    policy: str = ""
    margin: float = 0.0
    settings: dict[str, str] = {}
    solo_itl_ms: float | None = None
    running_job: str | None = None
    running_token: int | None = None


class Telemetry(Message, frozen=True, kw_only=True, tag=True):
    """One reporting interval (about half a second).

    `itl` holds (gap in ms, tokens that saw it) for decode steps whose gap contains no prefill, `stalls` those that do;
    `ttft_ms` and `tpot_ms` one value per request that got its first token, respectively ended, in the interval.
    `tenant_itl` holds those of `itl` that requests of a tenant with targets of its own saw, by tenant.
    `guard_pauses` and `guarded_s`: how often the guard acted, and how long finetuning stood still for it. `power_w`:
    what the GPU draws, watts; None where that is not told, as on a CPU.
    """

    engine_id: str
    time: float
    interval_s: float
    itl: list[tuple[float, int]] = []
    stalls: list[tuple[float, int]] = []
    ttft_ms: list[float] = []
    tpot_ms: list[float] = []
    tenant_itl: dict[str, list[tuple[float, int]]] = {}
    decode_steps: int = 0
    decode_tokens: int = 0
    finetune_tokens: int = 0
    tasklets: int = 0
    running: int = 0
    waiting: int = 0
    kv_used: int = 0
    kv_total: int = 0
    predicted_step_ms: float | None = None
    busy_share: float = 0.0
    decode_share: float = 0.0
    finetune_share: float = 0.0
    memory_bytes: int = 0
    power_w: float | None = None
    targets_version: int = 0
    plan: PlanView
    paused_reason: str | None = None
    guard_pauses: int = 0
    guarded_s: float = 0.0
    memory: MemoryView | None = None


class JobUpdate(Message, frozen=True, kw_only=True, tag=True):
    """What happened to the running job.

    kind: `started` (total_steps, and message when there is something to say of how it runs), `metric` (step, loss,
    eval_loss, learning_rate, grad_norm, tokens; best_step and best_loss with an eval_loss), `log` (message),
    `checkpoint` (step, path), `evaluated` (step, path of the adapter as it was evaluated), `stopped_early` (message),
    `paused`/`interrupted` (step, path of its checkpoint), `saving`, `succeeded` (path of the adapter folder, message
    when it is not that of the last step), `cancelled`, `failed` (code, message, param).
    """

    engine_id: str
    job_id: str
    token: int
    time: float
    kind: Literal[
        "started",
        "metric",
        "log",
        "checkpoint",
        "evaluated",
        "stopped_early",
        "paused",
        "resumed",
        "saving",
        "succeeded",
        "cancelled",
        "failed",
        "interrupted",
    ]
    step: int = 0
    total_steps: int | None = None
    epoch: float | None = None
    loss: float | None = None
    eval_loss: float | None = None
    best_step: int | None = None
    best_loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    tokens: int | None = None
    path: str | None = None
    code: str | None = None
    message: str | None = None
    param: str | None = None


class EngineNotice(Message, frozen=True, kw_only=True, tag=True):
    """Something about the engine that people should see (a fallback and its reason, a refused command)."""

    engine_id: str
    time: float
    level: Literal["info", "warning", "error"]
    code: str
    message: str


class Stopping(Message, frozen=True, kw_only=True, tag=True):
    """The engine has been asked to stop and takes no further job; `Goodbye` follows when what ran is checkpointed."""

    engine_id: str


class Learnt(Message, frozen=True, kw_only=True, tag=True):
    """What an engine that has no profile knows by experience, every ten seconds of a job, of the whole device.

    steps: (batch, mean ms, bound ms); tasklets: by kind (mean ms, bound ms); mix: how many tasklets of each kind an
    optimizer step has, and `step_tokens` the tokens that it trains on.
    """

    engine_id: str
    time: float
    steps: list[tuple[int, float, float]]
    tasklets: dict[str, tuple[float, float]]
    mix: dict[str, float]
    step_tokens: float


class Goodbye(Message, frozen=True, kw_only=True, tag=True):
    """The engine stops on purpose; whatever ran has been checkpointed and reported."""

    engine_id: str


# ---- control → engine ------------------------------------------------------------------------------------------------


class SetTargets(Message, frozen=True, kw_only=True, tag=True):
    """Replace the targets; the next plan obeys them. `tenants`: whose each adapter is, by its name, of tenants that
    have a target of their own."""

    version: int
    targets: tuple[Target, ...]
    tenants: dict[str, str] = {}


class StartJob(Message, frozen=True, kw_only=True, tag=True):
    """Run `spec`, from `resume_from` (a checkpoint folder) when that is set."""

    spec: JobSpec
    token: int
    resume_from: str | None = None


class PauseJob(Message, frozen=True, kw_only=True, tag=True):
    """Checkpoint, free what the job holds and report `paused`; a later `StartJob` resumes it."""

    job_id: str
    token: int


class StopJob(Message, frozen=True, kw_only=True, tag=True):
    """End the job: `save` writes the adapter as it stands (→ `succeeded`), else → `cancelled`."""

    job_id: str
    token: int
    save: bool = False


FromEngine = Hello | Telemetry | JobUpdate | EngineNotice | Learnt | Stopping | Goodbye
ToEngine = SetTargets | StartJob | PauseJob | StopJob
