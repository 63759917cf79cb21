"""Time slices behind the step, on the whole device."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from core.policy import bind
from core.policy.types import WHOLE, JobView, Layout, StepState, TaskletKind

KINDS: tuple[TaskletKind, ...] = ("forward",) * 4 + ("head",) + ("backward",) * 4 + ("optimizer",)


class Clockwork:
    """A device whose decode step takes 6 ms and whose tasklets take the times given."""

    stale = ""

    def __init__(self, **tasklets: float) -> None:
        self.tasklets = {"forward": 2.0, "head": 5.0, "backward": 3.0, "optimizer": 0.5} | tasklets

    def decode_ms(self, layout: Layout, padded: int, kv_tokens: int, max_kv: int = 0) -> float:
        return 6.0

    def decode_upper_ms(
        self, layout: Layout, padded: int, kv_tokens: int, beside: TaskletKind | None, max_kv: int = 0
    ) -> float:
        return 6.0 if layout == WHOLE and beside is None else inf

    def tasklet_ms(self, layout: Layout, kind: TaskletKind, padded: int = 0, kv_tokens: int = 0) -> float:
        return self.tasklets[kind]

    def observe_step(self, *args: object, **named: object) -> bool:
        return False

    def observe_tasklet(self, *args: object, **named: object) -> None:
        return None


def state(**changes: object) -> StepState:
    job = JobView("job", KINDS, tokens_per_tasklet=10.0)
    base = StepState(
        batch=8,
        padded=8,
        kv_tokens=4000,
        max_kv=600,
        waiting=0,
        prefill_waiting=0,
        slack_ms=(13.0,),
        inflight_ms=0.0,
        jobs=(job,),
        free_pages=0,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


POLICY = bind("tasklet_slices")


def test_takes_as_many_next_tasklets_as_fit_behind_the_step() -> None:
    plan, _ = POLICY.plan(state(), Clockwork(), POLICY.MEMORY)
    assert (plan.after, plan.beside, plan.layout, plan.job) == (3, 0, WHOLE, "job")  # 13 - 6 = 7 = three forwards


def test_the_tightest_of_several_targets_counts() -> None:
    plan, _ = POLICY.plan(state(slack_ms=(50.0, 10.5)), Clockwork(), POLICY.MEMORY)
    assert plan.after == 2


def test_work_still_queued_is_taken_off_the_slack() -> None:
    plan, _ = POLICY.plan(state(inflight_ms=3.0), Clockwork(), POLICY.MEMORY)
    assert plan.after == 2


@pytest.mark.parametrize("slack", [6.0, 0.0, -4.0])
def test_no_slack_means_a_pause_with_a_reason_and_no_overrun(slack: float) -> None:
    memory = POLICY.MEMORY
    for _ in range(2000):
        plan, memory = POLICY.plan(state(slack_ms=(slack,)), Clockwork(), memory)
        assert plan.after == 0 and plan.pause and "no slack" in plan.reason


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"prefill_waiting": 10}, "prefill"), ({"jobs": ()}, "no job"), ({"free_pages": -1}, "memory")],
)
def test_pauses_and_says_why(changes: dict[str, object], word: str) -> None:
    plan, _ = POLICY.plan(state(**changes), Clockwork(), POLICY.MEMORY)
    assert plan.after == 0 and plan.pause and word in plan.reason


def test_a_stale_predictor_pauses_with_its_reason() -> None:
    device = Clockwork()
    device.stale = "clock changed"
    plan, _ = POLICY.plan(state(), device, POLICY.MEMORY)
    assert plan.after == 0 and plan.reason == "clock changed"


def test_a_tasklet_longer_than_the_slack_runs_alone_and_within_the_allowance() -> None:
    device, memory, late = Clockwork(forward=9.0), POLICY.MEMORY, 0
    for _ in range(10_000):
        plan, memory = POLICY.plan(state(), device, memory)
        assert plan.after <= 1
        late += plan.after
    assert 35 <= late <= 40  # 0.4 % of the steps


def test_without_an_allowance_the_long_tasklet_waits_for_an_idle_device() -> None:
    patient = bind("tasklet_slices", allowance=0.0)
    device, memory = Clockwork(forward=30.0), patient.MEMORY
    for _ in range(1000):
        plan, memory = patient.plan(state(), device, memory)
        assert plan.after == 0
    plan, _ = patient.plan(state(batch=0, padded=0, slack_ms=()), device, memory)
    assert plan.after == 1


def test_an_idle_device_gets_a_bounded_run() -> None:
    idle = state(batch=0, padded=0, slack_ms=())
    plan, _ = POLICY.plan(idle, Clockwork(), POLICY.MEMORY)
    assert plan.after == 7  # 4 × 2 + 5 + 2 × 3 = 19 ms of the 20
