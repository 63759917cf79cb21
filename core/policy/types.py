"""What a policy sees and answers. Frozen values, no torch, no clock, no I/O.

A policy is a module with ``plan(state, predictor, memory) -> (StepPlan, memory)`` and ``MEMORY``, the record a run
starts with. It is deterministic: the same arguments give the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

TaskletKind = Literal["forward", "head", "backward", "optimizer"]


class Layout(NamedTuple):
    """How the SMs are split. whole: no split; split: decode on `decode_sms`, finetuning on `finetune_sms`;
    confined: decode on the whole device at high priority, finetuning on `finetune_sms` only."""

    kind: Literal["whole", "split", "confined"] = "whole"
    decode_sms: int = 0
    finetune_sms: int = 0

    def __str__(self) -> str:
        if self.kind == "split":
            return f"split({self.decode_sms}, {self.finetune_sms})"
        return f"confined({self.finetune_sms})" if self.kind == "confined" else "whole"


WHOLE = Layout()


@dataclass(frozen=True, slots=True)
class JobView:
    """One runnable finetune job: its next tasklets in order and what fairness needs to know of it."""

    job_id: str
    tasklets: tuple[TaskletKind, ...]
    tenant: str = "default"
    weight: float = 1.0
    priority: int = 0
    tokens_per_tasklet: float = 0.0
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class StepState:
    """The engine at the moment a decode step is planned.

    batch: running requests; padded: their number padded to the captured graph; kv_tokens: tokens in their KV cache,
    max_kv: the longest of them; waiting: queued requests; prefill_waiting: queued prompt tokens; slack_ms: for each
    target that applies, the ms that this step (decode, and what finetuning adds to it) may take; inflight_ms: finetune
    work launched earlier and not finished; jobs: runnable jobs, first the one whose micro-batch is open; layouts: the
    partitions that exist; free_pages: arena pages of 2 MiB that finetuning may take.
    """

    batch: int
    padded: int
    kv_tokens: int
    max_kv: int
    waiting: int
    prefill_waiting: int
    slack_ms: tuple[float, ...]
    inflight_ms: float
    jobs: tuple[JobView, ...]
    layouts: tuple[Layout, ...] = (WHOLE,)
    free_pages: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What to launch with this step: `beside` tasklets next to it on the layout's finetune part, `after` tasklets on
    the whole device behind it, all of `job`. `pause` asks for finetuning to stand still; `reason` is for people."""

    layout: Layout = WHOLE
    beside: int = 0
    after: int = 0
    job: str | None = None
    pause: bool = False
    reason: str = ""


class Predictor(Protocol):
    """Predicted durations in ms; `*_upper_ms` are the bounds that planning uses."""

    def decode_ms(self, layout: Layout, padded: int, kv_tokens: int) -> float:
        """One decode step alone."""

    def decode_upper_ms(self, layout: Layout, padded: int, kv_tokens: int, beside: TaskletKind | None) -> float:
        """Upper bound of one decode step, alone or beside a tasklet of the kind."""

    def tasklet_ms(self, layout: Layout, kind: TaskletKind) -> float:
        """Upper bound of one tasklet on the layout's finetune part (the whole device for ``whole``)."""


class Policy(Protocol):
    """A policy module."""

    MEMORY: Any

    def plan(self, state: StepState, predictor: Predictor, memory: Any) -> tuple[StepPlan, Any]:
        """The plan of one step and the policy's next memory."""
