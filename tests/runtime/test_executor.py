from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from core.policy.types import WHOLE, Layout, StepPlan
from core.runtime.executor import NO_TIME, Ran, Size, Step
from tests.runtime.device import Engine

SPLIT = Layout("split", 96, 36)
OTHER = Layout("split", 64, 68)
CONFINED = Layout("confined", 0, 36)
SIZE = Size(32, 20_000, 700)


def engine(decode_ms: float = 6.0, bound_ms: float = 60.0) -> Engine:
    tasklets = {WHOLE: 2.0, SPLIT: 4.0, OTHER: 3.0, CONFINED: 4.0}
    return Engine((WHOLE, SPLIT, OTHER, CONFINED), decode_ms, tasklets, bound_ms=bound_ms)


def step(e: Engine, plan: StepPlan) -> tuple[int, int]:
    """Answers how many tasklets were queued beside and behind steps since the last one."""
    e.executor.begin_step(plan.layout, SIZE)
    e.launch_decode(plan.layout)
    e.executor.step_launched(plan, e.job)
    return e.executor.take_counts()


def run(e: Engine, plans: list[StepPlan], overlap: bool) -> None:
    """Launch a step for each plan, the results coming in as SGLang's loop takes them."""
    for n, plan in enumerate(plans):
        before = e.clock.ms
        step(e, plan)
        assert e.clock.ms == before, "launching waited for the device"
        result = n - 1 if overlap else n
        if result >= 0:
            e.clock.ms = max(e.clock.ms, e.steps[result][2])
        e.executor.collect()


@pytest.mark.parametrize("overlap", [False, True])
def test_tasklets_beside_run_next_to_the_step(overlap: bool) -> None:
    e = engine()
    run(e, [StepPlan(SPLIT, beside=1)] * 4, overlap)
    for (_, begin, _), (layout, started, _) in zip(e.steps, e.job.ran, strict=True):
        assert layout == SPLIT
        assert started == begin


@pytest.mark.parametrize("overlap", [False, True])
def test_tasklets_after_run_between_this_step_and_the_next(overlap: bool) -> None:
    e = engine()
    run(e, [StepPlan(after=2)] * 4, overlap)
    for n in range(3):
        own = e.job.ran[2 * n : 2 * n + 2]
        assert own[0][1] == e.steps[n][2]
        assert own[1][2] == e.steps[n + 1][1]


@pytest.mark.parametrize("overlap", [False, True])
def test_tasklets_of_a_job_never_overlap_whatever_streams_they_are_on(overlap: bool) -> None:
    e = engine()
    plans = [
        StepPlan(SPLIT, 2), StepPlan(SPLIT, 1, 1), StepPlan(after=3), StepPlan(OTHER, 2, 1), StepPlan(CONFINED, 2),
        StepPlan(SPLIT, 1), StepPlan(after=1), StepPlan(),
    ]  # fmt: skip
    run(e, plans * 4, overlap)
    assert len(e.job.ran) == 4 * sum(plan.beside + plan.after for plan in plans)
    for (_, _, end), (_, begin, _) in zip(e.job.ran, e.job.ran[1:], strict=False):
        assert begin >= end


def test_after_waits_for_the_tasklets_beside_the_step() -> None:
    e = engine(decode_ms=6.0)
    step(e, StepPlan(SPLIT, beside=2, after=1))
    assert [ran[1:] for ran in e.job.ran] == [(0.0, 4.0), (4.0, 8.0), (8.0, 10.0)]


def test_a_change_of_layout_waits_for_the_part_that_is_left() -> None:
    e = engine()
    run(e, [StepPlan(SPLIT, beside=4), StepPlan(OTHER)], overlap=True)
    assert e.job.ran[-1][2] == 16.0
    assert e.steps[1][1] == 16.0


def test_the_same_layout_goes_on_while_its_part_still_works() -> None:
    e = engine()
    run(e, [StepPlan(SPLIT, beside=4), StepPlan(SPLIT)], overlap=True)
    assert e.steps[1][1] == e.steps[0][2]


def test_graphs_are_selected_once_a_change() -> None:
    e = engine()
    run(e, [StepPlan(), StepPlan(SPLIT), StepPlan(SPLIT), StepPlan()], overlap=False)
    assert e.selected == [SPLIT, WHOLE]


def test_confined_decode_and_a_split_share_the_finetune_part() -> None:
    e = engine()
    assert e.finetune[CONFINED] is e.finetune[SPLIT]
    run(e, [StepPlan(CONFINED, beside=1), StepPlan(SPLIT, beside=1)], overlap=False)
    assert [ran[0] for ran in e.job.ran] == [CONFINED, SPLIT]


def test_what_is_queued_is_bounded_and_one_tasklet_may_always_be() -> None:
    e = engine(bound_ms=10.0)
    assert step(e, StepPlan(SPLIT, beside=50)) == (3, 0)
    assert e.executor.queued_ms() == pytest.approx(12.0)
    assert step(e, StepPlan(SPLIT, beside=50)) == (0, 0)
    slow = engine(bound_ms=1.0)
    assert step(slow, StepPlan(SPLIT, beside=50)) == (1, 0)


def test_a_part_that_gets_no_tasklet_has_nothing_to_wait_for() -> None:
    """What the job had queued there is over when it is, not when the step begins that it would have waited for."""
    e = engine(bound_ms=10.0)
    step(e, StepPlan(SPLIT, beside=3))
    e.executor.other_batch()
    e.decode.run(200.0)  # a prefill
    assert step(e, StepPlan(SPLIT, beside=1)) == (0, 0)
    assert e.finetune[SPLIT].until == 12.0


def test_finetuning_may_come_before_what_the_engine_launches_next() -> None:
    e = engine()
    step(e, StepPlan(SPLIT, beside=3))
    e.executor.other_batch()
    assert e.decode.run(0.0)[0] == 6.0, "a prefill begins behind the step"
    e.executor.finetuning_first()
    assert e.decode.run(0.0)[0] == 12.0


def test_each_step_may_have_as_much_behind_it_whatever_the_one_before_left() -> None:
    """With overlap a step is planned while all that is behind the one before it has still to run."""
    e = engine(bound_ms=10.0)
    for asked, queued in ((4, 4), (4, 4), (50, 5)):
        step(e, StepPlan(after=asked))
        e.executor.catch_up()
        assert len(e.job.ran) == queued
        e.job.ran.clear()


def test_what_is_behind_the_steps_before_leaves_room_beside_this_one() -> None:
    """With overlap the tasklets behind two steps have yet to run when the next is launched."""
    e = engine(bound_ms=10.0)
    run(e, [StepPlan(SPLIT, beside=1, after=4)] * 6, overlap=True)
    e.executor.catch_up()
    assert len(e.job.ran) == 6 * 5


def test_with_overlap_what_comes_after_a_step_is_queued_just_before_the_next_launch() -> None:
    """So that what is taken from the job waits for what one step has behind it, and not two."""
    e = engine()
    assert step(e, StepPlan(after=3)) == (0, 3), "nothing lies before the first"
    assert step(e, StepPlan(after=2)) == (0, 0)
    assert len(e.job.ran) == 3 and e.executor.queued_ms() == pytest.approx(6.0)
    e.clock.ms = 6.0  # the first step's result
    e.executor.collect()
    for queued in (2, 0):
        e.executor.catch_up()
        assert e.executor.take_counts() == (0, queued)
    assert e.job.ran[3][1] == e.steps[1][2]
    step(e, StepPlan())
    assert e.steps[2][1] == e.job.ran[-1][2], "the next step waits for them"


@pytest.mark.parametrize("other", [lambda e: e.executor.other_batch(), lambda e: e.executor.idle(0, e.job)])
def test_whatever_comes_next_finds_them_queued(other: Callable[[Engine], object]) -> None:
    e = engine()
    step(e, StepPlan())
    step(e, StepPlan(after=2))
    other(e)
    assert len(e.job.ran) == 2 and e.decode.run(0.0)[0] == 16.0


@pytest.mark.parametrize(
    "other",
    [
        lambda e: e.executor.other_batch(), lambda e: e.executor.idle(3, e.job), lambda e: e.executor.catch_up(),
        lambda e: e.executor.begin_step(WHOLE, SIZE),
    ],
)  # fmt: skip
def test_what_is_beside_and_behind_steps_is_counted_whoever_has_it_queued(other: Callable[[Engine], object]) -> None:
    e = engine()
    assert step(e, StepPlan(SPLIT, beside=3, after=1)) == (3, 1)
    assert step(e, StepPlan(after=2)) == (0, 0)
    other(e)
    assert e.executor.take_counts() == (0, 2)
    assert e.executor.take_counts() == (0, 0)


def test_an_engine_that_is_late_does_not_keep_the_device_waiting() -> None:
    e = engine()
    step(e, StepPlan())
    e.clock.ms = 7.0  # the step is over, and its result not yet looked at
    assert step(e, StepPlan(after=2)) == (0, 2)


def test_no_tasklet_behind_the_step_when_those_beside_it_were_cut_short() -> None:
    e = engine(bound_ms=10.0)
    assert step(e, StepPlan(SPLIT, beside=50, after=1)) == (3, 0)


def test_inflight_counts_what_holds_the_next_step_and_beside_what_outlasts_this_one() -> None:
    e = engine()
    step(e, StepPlan(after=2))
    assert e.executor.inflight_ms() == pytest.approx(4.0)
    assert e.executor.beside_ms() == NO_TIME
    other = engine()
    step(other, StepPlan(SPLIT, beside=3))
    assert other.executor.inflight_ms() == 0.0
    assert other.executor.beside_ms().mean == pytest.approx(6.0)
    other.clock.ms = 2.0
    assert other.executor.beside_ms().mean == pytest.approx(6.0)  # both have 2 ms less to go


def test_what_outlasts_a_step_went_on_next_to_it_at_the_pace_there() -> None:
    e = engine(decode_ms=6.0)
    e.slower = 2.0
    step(e, StepPlan(SPLIT, beside=3))  # 8 ms each next to the step: when it is over, a quarter of the first is left
    assert e.executor.beside_ms().mean == pytest.approx(1.0 + 2 * 4.0)
    e.clock.ms = 3.0
    assert e.executor.beside_ms().mean == pytest.approx(1.0 + 2 * 4.0)


def test_what_is_left_on_a_part_is_told_on_average_and_at_most() -> None:
    e = engine(decode_ms=6.0)
    e.scatter = 1.5
    step(e, StepPlan(SPLIT, beside=3))
    left = e.executor.beside_ms()
    assert left.mean == pytest.approx(3 * 4.0 - 6.0)
    assert left.bound == pytest.approx(3 * 6.0 - 6.0)


def test_steps_that_take_longer_than_expected_do_not_add_up() -> None:
    """And shorter ones neither: each result that comes in says where the device is."""
    for really in (3.0, 9.0):
        e = engine(decode_ms=6.0)
        for _ in range(20):
            e.executor.begin_step(SPLIT, SIZE)
            e.steps.append((SPLIT, *e.decode.run(really)))
            e.executor.step_launched(StepPlan(SPLIT), None)
            if len(e.steps) > 1:
                e.clock.ms = e.steps[-2][2]
                e.executor.collect()
        e.executor.begin_step(SPLIT, SIZE)
        e.steps.append((SPLIT, *e.decode.run(6.0)))
        e.executor.step_launched(StepPlan(SPLIT, beside=5), e.job)
        assert e.executor.beside_ms().mean == pytest.approx(5 * 4.0 - 12.0)  # one step is under way, and one follows


def test_a_tasklet_that_began_in_the_middle_of_a_step_has_run_since_then() -> None:
    e = engine(decode_ms=6.0)
    step(e, StepPlan(SPLIT, beside=4))  # 4 ms each: the second begins 2 ms before the step is over
    step(e, StepPlan(SPLIT))
    e.clock.ms = 6.0
    e.executor.collect()
    assert e.executor.beside_ms().mean == pytest.approx(4 * 4.0 - 12.0)


def test_work_on_a_part_has_no_time_while_decode_waits_for_the_whole_device() -> None:
    e = engine(decode_ms=6.0)
    run(e, [StepPlan(SPLIT, after=2), StepPlan(SPLIT, beside=3)], overlap=True)
    # 4 ms behind the first step are followed by the second, next to which 6 of the 12 ms on its part are done
    assert e.executor.beside_ms().mean == pytest.approx(3 * 4.0 - 6.0)


def test_what_is_behind_an_earlier_step_is_no_part_of_the_next_gap() -> None:
    """In overlap order, in which none of it has begun when the second next step is planned."""
    e = engine()
    step(e, StepPlan(after=2))
    step(e, StepPlan(after=3))
    e.executor.catch_up()
    assert e.executor.queued_ms() == pytest.approx(10.0)
    assert e.executor.inflight_ms() == pytest.approx(6.0)


def test_a_step_beside_what_was_queued_before_it_is_no_step_alone() -> None:
    e = engine(decode_ms=6.0)
    for plan in [StepPlan(CONFINED, beside=3), StepPlan(CONFINED), StepPlan(CONFINED)]:
        step(e, plan)  # the tasklets end in the middle of the second
    e.clock.ms = 100.0
    steps, _ = e.executor.collect()
    assert [s.beside for s in steps] == ["forward", "forward", None]
    f = engine(decode_ms=6.0)
    step(f, StepPlan(CONFINED, beside=6))
    step(f, StepPlan(CONFINED))
    f.clock.ms = 13.0  # the second is over, and the tasklets are not
    steps, _ = f.executor.collect()
    assert [s.beside for s in steps] == ["forward", "forward"]


def test_results_tell_a_step_without_what_held_it() -> None:
    e = engine()
    run(e, [StepPlan(after=3), StepPlan(), StepPlan(SPLIT, beside=1)], overlap=False)
    e.clock.ms = 100.0
    step(e, StepPlan())
    e.clock.ms = 200.0
    steps, _ = e.executor.collect()
    assert [s.ms for s in steps] == [pytest.approx(82.0)]  # counted from when the device was free for it
    f = engine()
    for plan in [StepPlan(after=3), StepPlan(), StepPlan(SPLIT, beside=1)]:
        step(f, plan)
    f.clock.ms = 100.0
    steps, ran = f.executor.collect()
    assert [s.ms for s in steps] == [6.0, 6.0, 6.0]
    assert [s.beside for s in steps] == [None, None, "forward"]
    assert [(r.layout, r.ms, r.padded) for r in ran] == [(WHOLE, 2.0, 0)] * 3 + [(SPLIT, 4.0, 32)]


@pytest.mark.parametrize("seed", range(3))
def test_events_are_recorded_again_and_everything_still_takes_its_own_time(seed: int) -> None:
    """No two steps or tasklets take the same, so that a figure tells whose moments it was taken from."""
    e, draw = engine(bound_ms=200.0), Random(seed)
    steps: list[Step] = []
    ran: list[Ran] = []
    for n in range(500):
        plan = StepPlan(draw.choice((WHOLE, SPLIT, OTHER, CONFINED)), draw.randrange(4), draw.randrange(3))
        e.expected_ms = draw.uniform(4.0, 8.0)
        e.job.ms = {layout: draw.uniform(1.0, 4.0) for layout in e.job.ms}
        step(e, plan)
        if n:
            e.clock.ms = max(e.clock.ms, e.steps[n - 1][2])
        if draw.random() < 0.7:
            found = e.executor.collect()
            steps += found[0]
            ran += found[1]
        if n == 100:
            made = e.events
    assert e.events <= made + 20 and made < 100, "as many as are needed at a time"
    assert len(steps) > 450 and len(ran) > 800
    assert [s.ms for s in steps] == [pytest.approx(end - begin) for _, begin, end in e.steps[: len(steps)]]
    assert [r.ms for r in ran] == [pytest.approx(end - begin) for _, begin, end in e.job.ran[: len(ran)]]


def test_after_something_else_than_decode_a_step_counts_from_its_own_launch() -> None:
    e = engine()
    step(e, StepPlan())
    e.clock.ms = 6.0
    e.executor.other_batch()
    e.decode.run(50.0)
    for _ in range(3):
        step(e, StepPlan())
    e.clock.ms = 100.0
    steps, _ = e.executor.collect()
    assert [s.ms for s in steps] == [6.0] * 4
    assert [s.early for s in steps] == [True, True, True, False]


def test_when_nothing_decodes_the_whole_device_is_fed_and_a_step_waits_for_it() -> None:
    e = engine()
    assert e.executor.idle(4, e.job) == 4
    assert e.executor.inflight_ms() == pytest.approx(8.0)
    e.clock.ms = 1.0
    step(e, StepPlan())
    assert e.steps[0][1] == 8.0


def test_a_job_without_more_tasklets_ends_the_plan() -> None:
    e = engine()
    e.job.left = 1
    assert step(e, StepPlan(SPLIT, beside=3, after=1)) == (1, 0)


@pytest.mark.parametrize("index", range(4))
def test_a_failing_tasklet_leaves_the_steps_in_order(index: int) -> None:
    e = engine()
    e.job.fail_at = index
    e.executor.begin_step(SPLIT, SIZE)
    e.launch_decode(SPLIT)
    with pytest.raises(RuntimeError):
        e.executor.step_launched(StepPlan(SPLIT, beside=2, after=2), e.job)
    e.job.fail_at = None
    e.executor.begin_step(WHOLE, SIZE)
    e.launch_decode(WHOLE)
    e.executor.step_launched(StepPlan(), None)
    e.clock.ms = 100.0
    steps, ran = e.executor.collect()
    assert len(steps) == 2
    assert len(ran) == index
    assert e.executor.queued_ms() == 0.0


def test_drain_waits_until_nothing_is_queued() -> None:
    e = engine()
    step(e, StepPlan(SPLIT, beside=2, after=1))
    e.executor.drain()
    assert e.clock.ms == 10.0
    assert len(e.executor.collect()[1]) == 3
