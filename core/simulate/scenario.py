"""What a simulation is asked: the requests, the target, the finetune jobs, the limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal

from core.errors import Invalid
from core.workload.arrivals import Arrival


@dataclass(frozen=True, slots=True)
class FinetuneJob:
    """A finetune job: it comes at `arrival_s` and ends after `tokens` trained tokens (None: never)."""

    job_id: str
    tenant: str = "default"
    weight: float = 1.0
    priority: int = 0
    arrival_s: float = 0.0
    tokens: int | None = None
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run.

    seconds: the run ends then, whatever still runs. target_ms and kind: of the gap between two tokens (`itl`), or of a
    request's mean gap (`tpot`). prefill: `elsewhere` (a request comes with its KV cache and first token, as in a
    decode-only engine) or `here` (first come, first served, before any decode step; chunked). kv_tokens: KV limit, None
    for what the arena holds. reserve_blocks: KV blocks of 1,024 tokens that finetuning never takes. drift: from each
    time (s) on, decode steps take this factor longer. warmup_s: figures count from then on, when the batch has filled
    and the predictor has seen some steps. seed: of the noise.
    """

    arrivals: Sequence[Arrival]
    seconds: float
    target_ms: float
    target_kind: Literal["itl", "tpot"] = "itl"
    jobs: tuple[FinetuneJob, ...] = (FinetuneJob("job"),)
    prefill: Literal["elsewhere", "here"] = "elsewhere"
    max_running: int = 256
    kv_tokens: int | None = None
    reserve_blocks: int = 8
    drift: tuple[tuple[float, float], ...] = ()
    warmup_s: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("seconds", "target_ms", "max_running"):
            value = getattr(self, name)
            if not (isfinite(value) and value > 0):
                raise Invalid("scenario", f"scenario: {name} is {value}; give a number above zero", name)
        if not 0 <= self.warmup_s < self.seconds:
            raise Invalid("scenario", f"scenario: warmup_s is {self.warmup_s}; give 0 to {self.seconds} s", "warmup_s")
