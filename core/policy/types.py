"""What a policy sees and answers. Frozen values, no torch, no clock, no I/O.

A policy is a module with ``plan(state, predictor, memory) -> (StepPlan, memory)`` and ``MEMORY``, the record a run
starts with. It is deterministic: the same arguments give the same plan. What can be tuned is a frozen record ``Knobs``,
the last argument of ``plan``; `core.policy.bind` fixes it.

Time of a step, as every plan counts it: `inflight_ms` drains first, then the decode step runs with `beside` next to it,
then `after` follows once both are done (they go on with the same micro-batch), and the next step waits for it. So the
gap to this step's tokens is inflight + decode, and that to the next step's max(0, beside - decode) + after + decode
when there is an `after`; without one `beside` may run on next to the following steps of the same layout.
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
    """One runnable finetune job: its next tasklets in order and what fairness needs to know of it.

    pages: arena pages that its next tasklets need beyond those it holds; boundary: an optimizer step has just
    ended, so that another job may take the next turn (of the first job only; the others wait at one anyway).
    """

    job_id: str
    tasklets: tuple[TaskletKind, ...]
    tenant: str = "default"
    weight: float = 1.0
    priority: int = 0
    tokens_per_tasklet: float = 0.0
    deadline_s: float | None = None
    pages: int = 0
    boundary: bool = False


@dataclass(frozen=True, slots=True)
class StepState:
    """The engine at the moment a decode step is planned.

    batch: running requests; padded: their number padded to the captured graph; kv_tokens: tokens in their KV cache,
    max_kv: the longest of them; waiting: queued requests; prefill_waiting: queued prompt tokens; slack_ms: for each
    target that applies, the ms that the gap to this step's tokens may take; target_ms: for each the ms that a gap gets
    by itself, another figure where early and late tokens of a request make up for each other (empty: as `slack_ms`);
    inflight_ms: finetune work launched earlier and not finished that this step has to wait for; jobs: runnable jobs,
    first the one whose micro-batch is open; layouts: the partitions that exist; free_pages: arena pages that
    finetuning may take, and kv_tokens_per_page: KV tokens that one of them would hold (0: the KV cache has memory of
    its own); layout: that of the last step, and beside_ms the finetune work that still runs on its finetune part when
    this step can start, in ms without decode beside it, at most, since a step of another layout has to wait for it;
    beside_mean_ms: the same on average.
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
    layout: Layout = WHOLE
    beside_ms: float = 0.0
    beside_mean_ms: float = 0.0
    target_ms: tuple[float, ...] = ()
    kv_tokens_per_page: float = 0.0


class StepPlan(NamedTuple):
    """What to launch with this step: `beside` tasklets next to it on the layout's finetune part, `after` tasklets on
    the whole device behind it, all of `job`. `pause` asks for finetuning to stand still; `reason` is for people."""

    layout: Layout = WHOLE
    beside: int = 0
    after: int = 0
    job: str | None = None
    pause: bool = False
    reason: str = ""


class Predictor(Protocol):
    """Predicted durations in ms; `*_upper_ms` are the bounds that planning uses. A duration that cannot be promised
    (outside what was measured, a partition without a fit) is ``inf``.

    stale: why the predictions cannot be trusted at present, empty when they can; a policy then plans no finetuning.
    """

    @property
    def stale(self) -> str: ...

    def decode_ms(
        self, layout: Layout, padded: int, kv_tokens: int, max_kv: int = 0, beside: TaskletKind | None = None
    ) -> float:
        """One decode step on average, alone or beside a tasklet of the kind."""

    def decode_upper_ms(
        self, layout: Layout, padded: int, kv_tokens: int, beside: TaskletKind | None, max_kv: int = 0
    ) -> float:
        """Upper bound of one decode step, alone or beside a tasklet of the kind."""

    def tasklet_ms(self, layout: Layout, kind: TaskletKind, padded: int = 0, kv_tokens: int = 0) -> float:
        """Upper bound of one tasklet on the layout's finetune part (the whole device for ``whole``), beside a decode
        step of that size or alone (0)."""

    def tasklet_mean_ms(self, layout: Layout, kind: TaskletKind, padded: int = 0, kv_tokens: int = 0) -> float:
        """What such a tasklet takes on average: for what it is worth, not for what has to end in time."""

    def observe_step(
        self,
        layout: Layout,
        padded: int,
        kv_tokens: int,
        ms: float,
        beside: TaskletKind | None = None,
        max_kv: int = 0,
    ) -> bool:
        """Learn from a decode step that took `ms`; `beside` is the kind of the first tasklet that ran next to it.
        Answers whether the step outlasted the bound that held for it."""

    def observe_tasklet(
        self, layout: Layout, kind: TaskletKind, ms: float, padded: int = 0, kv_tokens: int = 0
    ) -> None:
        """Learn from one tasklet that took `ms`."""


class Policy(Protocol):
    """A policy module, or what `core.policy.bind` makes of it."""

    MEMORY: Any

    def plan(self, state: StepState, predictor: Predictor, memory: Any) -> tuple[StepPlan, Any]:
        """The plan of one step and the policy's next memory."""
