"""A small device, whose figures can be computed by hand, and a policy that plans what it is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from core.policy.bound import BoundPolicy
from core.policy.types import Layout, StepPlan, StepState
from core.simulate.profile import DeviceProfile, LayoutProfile, Surface, TaskletProfile

SPLIT = Layout("split", 6, 4)
CONFINED = Layout("confined", 0, 4)


def small_profile(arena_pages: int = 6400, tail: float = 0.0) -> DeviceProfile:
    """Decode 4 ms + 0.1 a request; beside 6 + 0.1; finetuning at half speed on the part, at a quarter beside decode.
    Tasklets of 1 ms: 2 forward, 1 head, 2 backward, 1 optimizer."""
    alone, beside = Surface(base=4.0, per_request=0.1), Surface(base=6.0, per_request=0.1)
    spread = Surface(base=tail)

    def part(layout: Layout) -> LayoutProfile:
        return LayoutProfile(
            kind=layout.kind, decode_sms=layout.decode_sms, finetune_sms=layout.finetune_sms, alone_ms=alone,
            alone_tail=spread, beside_ms=beside, beside_tail=spread, speed=Surface(base=0.25), alone_speed=0.5,
        )  # fmt: skip

    whole = LayoutProfile(
        kind="whole", decode_sms=0, finetune_sms=0, alone_ms=alone, alone_tail=spread, alone_speed=1.0
    )
    return DeviceProfile(
        device="small", model="tiny", sms=10, captured=(1, 2, 4, 8), arena_pages=arena_pages,
        kv_bytes_per_token=131_072, prefill_ms_per_token=0.01, layouts=(whole, part(SPLIT), part(CONFINED)),
        tasklets=TaskletProfile(
            tokens=60, forward_ms=(1.0, 1.0), head_ms=(1.0,), backward_ms=(1.0, 1.0), optimizer_ms=1.0,
            activation_pages=600, state_pages=40,
        ),
        noise=((0.0, -0.6), (0.5, 0.0), (0.99, 1.0), (1.0, 1.05)),
    )  # fmt: skip


def planned(choose: Callable[[StepState], StepPlan]) -> BoundPolicy:
    """A policy that plans `choose(state)`."""

    def plan(state: StepState, predictor: Any, memory: None) -> tuple[StepPlan, None]:
        return choose(state), None

    return BoundPolicy("told", None, None, plan)
