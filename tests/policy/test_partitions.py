"""Policies that only split the SMs: static, harli and its hysteresis rule."""

from __future__ import annotations

import pytest

from core.policy import bind
from core.policy.types import WHOLE, StepPlan
from tests.policy.clockwork import HALF, LAYOUTS, SMALL, Clockwork, state

PARTITIONED = ["static", "harli", "harli_hysteresis"]


def once(name: str, slack: float, **knobs: object) -> StepPlan:
    policy = bind(name, **knobs)
    plan, _ = policy.plan(state(slack_ms=(slack,), layouts=LAYOUTS), Clockwork(), policy.MEMORY)
    return plan


@pytest.mark.parametrize(("sms", "layout"), [(10, SMALL), (20, SMALL), (60, HALF), (132, HALF)])
def test_static_takes_the_split_nearest_to_its_share_whatever_the_target(sms: int, layout: object) -> None:
    for slack in (3.0, 100.0):
        plan = once("static", slack, finetune_sms=sms)
        assert plan.layout == layout and plan.beside and not plan.after


@pytest.mark.parametrize(("slack", "layout"), [(6.5, WHOLE), (7.0, SMALL), (9.9, SMALL), (10.0, HALF), (99.0, HALF)])
def test_harli_takes_the_largest_part_that_holds_the_target(slack: float, layout: object) -> None:
    plan = once("harli", slack)
    assert plan.layout == layout
    assert bool(plan.beside) == (layout != WHOLE)


def test_harli_waits_for_work_on_another_part_only_if_there_is_time() -> None:
    policy = bind("harli")
    here = state(slack_ms=(12.0,), layouts=LAYOUTS, layout=SMALL, beside_ms=4.0)
    assert policy.plan(here, Clockwork(), policy.MEMORY)[0].layout == SMALL
    here = state(slack_ms=(14.0,), layouts=LAYOUTS, layout=SMALL, beside_ms=4.0)
    assert policy.plan(here, Clockwork(), policy.MEMORY)[0].layout == HALF


def test_the_hysteresis_rule_goes_up_and_down_by_one_notch() -> None:
    policy = bind("harli_hysteresis")
    memory, layouts = policy.MEMORY, []
    for slack in [40.0] * 3 + [12.0] * 2 + [9.0] * 3:
        plan, memory = policy.plan(state(slack_ms=(slack,), layouts=LAYOUTS), Clockwork(), memory)
        layouts.append(plan.layout)
    # 10 ms on half the device is neither over 12 nor under three quarters of it, and over 9; 7 ms then stays
    assert layouts == [SMALL, HALF, HALF, HALF, HALF, SMALL, SMALL, SMALL]


@pytest.mark.parametrize("name", PARTITIONED)
def test_a_part_gets_just_what_keeps_it_busy_during_the_step(name: str) -> None:
    policy = bind(name)
    memory = policy.MEMORY
    for _ in range(2):
        plan, memory = policy.plan(state(slack_ms=(50.0,), layouts=(WHOLE, HALF)), Clockwork(), memory)
    assert (plan.layout, plan.beside) == (HALF, 3)  # 4 ms each next to a step of 10
    running = state(slack_ms=(50.0,), layouts=(WHOLE, HALF), layout=HALF, beside_ms=3.0, beside_mean_ms=3.0)
    assert policy.plan(running, Clockwork(), memory)[0].beside == 2


@pytest.mark.parametrize("name", PARTITIONED)
def test_a_device_without_partitions_decodes_alone(name: str) -> None:
    policy = bind(name)
    plan, _ = policy.plan(state(slack_ms=(50.0,)), Clockwork(), policy.MEMORY)
    assert (plan.layout, plan.beside, plan.after) == (WHOLE, 0, 0) and plan.reason
