"""Time slices behind the step, on the whole device."""

from __future__ import annotations

import pytest

from core.policy import bind
from core.policy.types import WHOLE
from tests.policy.clockwork import Clockwork, state

POLICY = bind("tasklet_slices")


def test_takes_as_many_next_tasklets_as_fit_behind_the_step() -> None:
    plan, _ = POLICY.plan(state(), Clockwork(), POLICY.MEMORY)
    assert (plan.after, plan.beside, plan.layout, plan.job) == (3, 0, WHOLE, "job")  # 13 - 6 = 7 = three forwards


def test_the_tightest_of_several_targets_counts() -> None:
    plan, _ = POLICY.plan(state(slack_ms=(50.0, 10.5)), Clockwork(), POLICY.MEMORY)
    assert plan.after == 2


def test_queued_work_costs_the_next_step_only_what_this_gap_takes_too_long() -> None:
    plan, _ = POLICY.plan(state(inflight_ms=7.0), Clockwork(), POLICY.MEMORY)
    assert plan.after == 3  # 7 + 6 = 13 is in time
    early = state(inflight_ms=7.0, slack_ms=(15.0,), target_ms=(10.0,))  # a gap of 13 where 10 is the share
    plan, _ = POLICY.plan(early, Clockwork(), POLICY.MEMORY)
    assert plan.after == 3  # 15 - 3 - 6


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
    plan, _ = POLICY.plan(state(), Clockwork(stale="clock changed"), POLICY.MEMORY)
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


def test_without_a_target_a_slice_is_as_long_as_an_idle_run() -> None:
    plan, _ = POLICY.plan(state(slack_ms=()), Clockwork(), POLICY.MEMORY)
    assert plan.after == 7


def test_a_step_of_unknown_size_gets_nothing() -> None:
    plan, _ = POLICY.plan(state(), Clockwork(decode_ms=float("inf")), POLICY.MEMORY)
    assert plan.after == 0 and "no prediction" in plan.reason
