"""A device whose every duration is known, for tests of policies."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

from core.policy.types import WHOLE, JobView, Layout, StepState, TaskletKind

KINDS: tuple[TaskletKind, ...] = ("forward",) * 4 + ("head",) + ("backward",) * 4 + ("optimizer",)
HALF, SMALL, CONFINED = Layout("split", 64, 68), Layout("split", 112, 20), Layout("confined", 0, 36)
LAYOUTS = (WHOLE, SMALL, HALF, CONFINED)


class Clockwork:
    """A decode step takes 6 ms on the whole device, 7, 10 and 8 ms beside finetuning in the other layouts; tasklets
    take the times given, four times, twice and three times as long on the parts."""

    def __init__(self, *, decode_ms: float = 6.0, stale: str = "", **tasklets: float) -> None:
        self.tasklets = {"forward": 2.0, "head": 5.0, "backward": 3.0, "optimizer": 0.5} | tasklets
        self.steps = {WHOLE: decode_ms, SMALL: 7.0, HALF: 10.0, CONFINED: 8.0}
        self.slower = {WHOLE: 1.0, SMALL: 4.0, HALF: 2.0, CONFINED: 3.0}
        self.stale = stale

    def decode_ms(
        self, layout: Layout, padded: int, kv_tokens: int, max_kv: int = 0, beside: TaskletKind | None = None
    ) -> float:
        return self.steps.get(layout, inf)

    def decode_upper_ms(
        self, layout: Layout, padded: int, kv_tokens: int, beside: TaskletKind | None, max_kv: int = 0
    ) -> float:
        return inf if (layout == WHOLE) != (beside is None) else self.steps.get(layout, inf)

    def tasklet_ms(self, layout: Layout, kind: TaskletKind, padded: int = 0, kv_tokens: int = 0) -> float:
        return self.tasklets[kind] * self.slower.get(layout, inf)

    def tasklet_mean_ms(self, layout: Layout, kind: TaskletKind, padded: int = 0, kv_tokens: int = 0) -> float:
        return self.tasklet_ms(layout, kind, padded, kv_tokens)

    def observe_step(self, *measured: Any, **named: Any) -> bool:
        raise AssertionError("a policy does not measure")

    def observe_tasklet(self, *measured: Any, **named: Any) -> None:
        raise AssertionError("a policy does not measure")


def state(**changes: Any) -> StepState:
    """Eight requests, one job, 13 ms of slack, no partitions."""
    job = JobView("job", KINDS, tokens_per_tasklet=10.0)
    base = StepState(
        batch=8, padded=8, kv_tokens=4000, max_kv=600, waiting=0, prefill_waiting=0, slack_ms=(13.0,), inflight_ms=0.0,
        jobs=(job,),
    )  # fmt: skip
    return replace(base, **changes)
