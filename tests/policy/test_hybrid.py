"""Beside and after, planned together."""

from __future__ import annotations

from collections import Counter
from typing import Any

from core.policy import bind
from core.policy.types import WHOLE, JobView, StepPlan
from tests.policy.clockwork import CONFINED, HALF, LAYOUTS, SMALL, Clockwork, state

POLICY = bind("hybrid", allowance=0.0)
SLICES = bind("tasklet_slices", allowance=0.0)


def first(slack: float, **changes: Any) -> StepPlan:
    plan, _ = POLICY.plan(state(slack_ms=(slack,), layouts=LAYOUTS, **changes), Clockwork(), POLICY.MEMORY)
    return plan


def test_too_tight_for_any_partition_and_for_a_slice_is_decode_alone() -> None:
    plan = first(6.5)
    assert (plan.layout, plan.beside, plan.after, plan.pause) == (WHOLE, 0, 0, True)


def test_where_no_tasklet_fits_behind_the_step_a_small_part_is_kept_busy_beside_it() -> None:
    plan = first(7.5)
    assert (plan.layout, plan.after) == (SMALL, 0)
    assert plan.beside == 1  # 8 ms for one forward tasklet there, the step takes 7


def test_the_part_that_trains_most_within_the_target_is_taken() -> None:
    assert first(10.0).layout == HALF  # half the speed; behind the step alone 4 ms of 10 would be used


def test_with_a_loose_target_both_the_part_and_the_slack_behind_the_step_are_used() -> None:
    here = state(slack_ms=(26.0,), layouts=LAYOUTS)
    plan, _ = POLICY.plan(here, Clockwork(forward=2.5), POLICY.MEMORY)
    # two forwards of 5 ms next to the step of 10; behind it two forwards, the head and two backwards in 16 ms
    assert (plan.layout, plan.beside, plan.after) == (HALF, 2, 5)


def test_without_partitions_it_is_the_planner_of_time_slices() -> None:
    memory = POLICY.MEMORY, SLICES.MEMORY
    for slack in (6.0, 8.0, 13.0, 30.0, 100.0):
        mine, _ = POLICY.plan(state(slack_ms=(slack,)), Clockwork(), memory[0])
        other, _ = SLICES.plan(state(slack_ms=(slack,)), Clockwork(), memory[1])
        assert (mine.after, mine.beside, mine.reason) == (other.after, 0, other.reason)


class Scattered(Clockwork):
    """Tasklets on parts take their bound in one of hundred cases, and a good half of it on average."""

    def tasklet_mean_ms(self, layout: Any, kind: Any, padded: int = 0, kv_tokens: int = 0) -> float:
        return self.tasklet_ms(layout, kind) / (1.0 if layout == WHOLE else 1.6)


def test_what_a_part_trains_is_told_by_the_mean_of_its_tasklets() -> None:
    here = state(slack_ms=(14.0,), layouts=(WHOLE, HALF))
    assert POLICY.plan(here, Clockwork(), POLICY.MEMORY)[0].layout == WHOLE  # 8 of 14 ms behind the step, half beside
    assert POLICY.plan(here, Scattered(), POLICY.MEMORY)[0].layout == HALF


def test_what_a_slice_trains_is_told_by_what_its_step_takes_on_average() -> None:
    class Mostly(Clockwork):
        """Steps on the whole device outlast 3 ms in one of hundred cases."""

        def decode_ms(self, layout: Any, *size: Any, **named: Any) -> float:
            return 3.0 if layout == WHOLE else super().decode_ms(layout, *size, **named)

    here = state(slack_ms=(11.0,), layouts=(WHOLE, HALF))  # two forwards of 2 ms behind a step of 6, or half beside
    assert POLICY.plan(here, Clockwork(), POLICY.MEMORY)[0].layout == HALF
    assert POLICY.plan(here, Mostly(), POLICY.MEMORY)[0].layout == WHOLE


def test_a_part_that_is_kept_busy_is_so_when_its_tasklets_take_what_they_mostly_do() -> None:
    job = JobView("job", ("forward",) * 20, tokens_per_tasklet=10.0)
    here = state(slack_ms=(11.0,), layouts=(WHOLE, HALF), jobs=(job,))
    assert POLICY.plan(here, Scattered(), POLICY.MEMORY)[0].beside == 4  # of 2.5 ms, the step takes 10
    going = state(slack_ms=(11.0,), layouts=(WHOLE, HALF), jobs=(job,), layout=HALF, beside_ms=8.0, beside_mean_ms=5.0)
    assert POLICY.plan(going, Scattered(), POLICY.MEMORY)[0].beside == 2  # what runs there has 5 ms to go, as have two


def test_a_request_that_was_served_early_lends_its_gain() -> None:
    assert first(40.0, target_ms=(10.0,)).after > first(26.0, target_ms=(26.0,)).after


def test_queued_work_makes_room_before_another_layout_is_entered() -> None:
    plan = first(11.0, inflight_ms=4.0)  # half the device would need 4 + 10
    assert (plan.layout, plan.after) == (WHOLE, 0)
    assert "room" in plan.reason


def test_work_on_the_part_is_not_waited_for_when_the_step_next_to_it_is_shorter() -> None:
    plan = first(6.2, layout=HALF, beside_ms=9.0)  # nothing holds 6.2 ms; to leave takes 9 + 6, to stay 10
    assert (plan.layout, plan.beside, plan.after) == (HALF, 0, 0)


def test_what_still_runs_on_a_part_takes_longer_next_to_a_step_than_after_it() -> None:
    class Slowed(Clockwork):
        def tasklet_ms(self, layout: Any, kind: Any, padded: int = 0, kv_tokens: int = 0) -> float:
            return super().tasklet_ms(layout, kind) * (1.5 if padded and layout != WHOLE else 1.0)

    job = JobView("job", ("forward",) * 20, tokens_per_tasklet=10.0)
    here = state(slack_ms=(20.0,), layouts=(WHOLE, HALF), layout=HALF, beside_ms=6.0, jobs=(job,))
    plan, _ = POLICY.plan(here, Slowed(decode_ms=19.0), POLICY.MEMORY)
    # next to the step of 10 ms the 6 take 9 and one more tasklet 6; the 5 that are left then take 3.3
    assert (plan.layout, plan.beside, plan.after) == (HALF, 1, 3)


def test_a_part_that_works_is_left_only_for_a_clear_gain() -> None:
    eager, sedate = bind("hybrid", gain=0.0), bind("hybrid", gain=1.0)
    here = state(slack_ms=(10.5,), layouts=LAYOUTS, layout=CONFINED, beside_ms=0.5)
    assert eager.plan(here, Clockwork(), eager.MEMORY)[0].layout == HALF
    assert sedate.plan(here, Clockwork(), sedate.MEMORY)[0].layout == CONFINED


def test_between_two_comparisons_only_the_best_layouts_are_asked_about() -> None:
    asked: Counter[object] = Counter()

    class Counting(Clockwork):
        def decode_upper_ms(self, layout: Any, *rest: Any) -> float:  # type: ignore[override]
            asked[layout] += 1
            return super().decode_upper_ms(layout, *rest)

    policy, memory = bind("hybrid", hold=10, few=1), POLICY.MEMORY
    for _ in range(101):
        _, memory = policy.plan(state(slack_ms=(10.0,), layouts=LAYOUTS), Counting(), memory)
    assert asked[HALF] == 101
    assert asked[SMALL] == asked[CONFINED] == 11


def test_a_target_shorter_than_a_part_has_nothing_behind_the_next_step() -> None:
    """Where an early token lends its slack to this step only: 1.5 ms are left for the next, which takes 10."""
    plan = first(13.0, target_ms=(1.0,), inflight_ms=2.5)
    assert (plan.layout, plan.after) == (HALF, 0)


def test_steps_that_get_a_part_earn_no_late_ones() -> None:
    policy = bind("hybrid")

    def late(slack: float) -> bool:
        """One of the ten steps without room that follow 400 of such a slack carries a tasklet all the same."""
        memory, plans = policy.MEMORY, []
        for ms in [slack] * 400 + [6.5] * 10:
            plan, memory = policy.plan(state(slack_ms=(ms,), layouts=LAYOUTS), Clockwork(), memory)
            plans.append(plan)
        return any(plan.after for plan in plans[400:])

    assert late(6.0)  # not one of the 400 may be late: a step by itself takes as long as its slack
    assert not late(7.5)


def test_waiting_requests_take_the_slack_away_and_give_it_back() -> None:
    policy, memory = bind("hybrid", yielding=0.05), POLICY.MEMORY
    planned = []
    for step in range(1200):
        crowd = 5 if 100 <= step < 300 else 0
        plan, memory = policy.plan(state(slack_ms=(40.0,), waiting=crowd), Clockwork(), memory)
        planned.append(plan.after)
    assert planned[99] > planned[120] > planned[299] == 0
    assert planned[-1] == planned[99]


def test_nothing_decodes_and_the_whole_device_trains() -> None:
    plan = first(0.0, batch=0, padded=0, kv_tokens=0)
    assert (plan.layout, plan.beside) == (WHOLE, 0) and plan.after
