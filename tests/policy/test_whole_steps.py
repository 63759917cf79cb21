"""Policies that run whole micro-batches or whole chunks of one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.policy import bind
from core.policy.types import StepPlan
from tests.policy.clockwork import KINDS, Clockwork, state

MICRO_BATCH_MS = 25.5  # four forward tasklets of 2 ms, a head of 5, four backward ones of 3, an optimizer of 0.5


def once(name: str, slack: float, **knobs: object) -> StepPlan:
    policy = bind(name, **knobs)
    return policy.plan(state(slack_ms=(slack,)), Clockwork(), policy.MEMORY)[0]


def test_a_micro_step_runs_whole_or_not_at_all() -> None:
    assert once("step_slices", 6.0 + MICRO_BATCH_MS - 0.1).after == 0
    assert once("step_slices", 6.0 + MICRO_BATCH_MS).after == len(KINDS)


def test_the_deferral_bound_is_a_limit_of_its_own() -> None:
    assert once("step_slices", 100.0, deferral_ms=20.0).after == 0
    assert once("step_slices", 100.0, deferral_ms=30.0).after == len(KINDS)


def test_what_is_left_of_a_micro_step_ends_with_its_optimizer() -> None:
    here = state(slack_ms=(100.0,))
    two = replace(here.jobs[0], tasklets=KINDS[5:] + KINDS)
    policy = bind("step_slices")
    assert policy.plan(replace(here, jobs=(two,)), Clockwork(), policy.MEMORY)[0].after == 5


def test_an_idle_device_runs_a_micro_step_and_then_waits_for_it() -> None:
    policy = bind("step_slices")
    plan, _ = policy.plan(state(batch=0, slack_ms=()), Clockwork(), policy.MEMORY)
    assert plan.after == len(KINDS)
    plan, _ = policy.plan(state(batch=0, slack_ms=(), inflight_ms=3.0), Clockwork(), policy.MEMORY)
    assert plan.after == 0


@pytest.mark.parametrize(
    ("slack", "after"),
    [(13.9, 0), (14.0, 4), (18.9, 4), (19.0, 5), (31.4, 5), (31.5, 10)],  # forward 8, head 5, backward + optimizer 12.5
)
def test_a_chunk_takes_whole_phases(slack: float, after: int) -> None:
    assert once("chunked", slack).after == after


def test_a_phase_longer_than_every_slack_gets_its_turn_within_the_allowance() -> None:
    policy = bind("chunked", allowance=0.01)
    memory, late = policy.MEMORY, 0
    for _ in range(1000):
        plan, memory = policy.plan(state(slack_ms=(10.0,)), Clockwork(), memory)
        assert plan.after in (0, 4)
        late += plan.after == 4
    assert 8 <= late <= 10
