"""The predictor that runs: what it answers, how it learns, when it distrusts itself."""

from __future__ import annotations

import pickle
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import Invalid
from core.policy.types import WHOLE, Layout
from core.predictor.profile import TaskletPoint
from core.predictor.two_stage import TwoStagePredictor
from tests.predictor.synthetic import CAPTURED, LAYOUTS, SMS, TASKLETS, profile, step_ms

FITTED = pickle.dumps(TwoStagePredictor(profile()))
HALF, CONFINED = Layout("split", 64, 68), Layout("confined", 0, 68)
SIZE = (32, 32 * 512)


@pytest.fixture
def predictor() -> TwoStagePredictor:
    fresh: TwoStagePredictor = pickle.loads(FITTED)
    return fresh


def test_knows_the_layouts_of_its_profile_the_whole_device_first(predictor: TwoStagePredictor) -> None:
    assert predictor.layouts[0] == WHOLE
    assert set(predictor.layouts) == set(LAYOUTS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_predicts_a_step_alone(predictor: TwoStagePredictor, layout: Layout) -> None:
    where = WHOLE if layout.kind == "confined" else layout  # nothing beside: decode has all SMs
    assert predictor.decode_ms(layout, *SIZE) == pytest.approx(step_ms(where, *SIZE, beside=False), rel=0.01)


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_bounds_a_step_beside_with_the_measured_p99_and_some_room_for_the_fit(
    predictor: TwoStagePredictor, layout: Layout
) -> None:
    true = step_ms(layout, *SIZE, beside=True)
    assert predictor.decode_upper_ms(layout, *SIZE, "forward") == pytest.approx(true * 1.05 * 1.03, rel=0.02)


def test_a_tasklet_takes_longer_on_a_part_and_longer_still_next_to_decode(predictor: TwoStagePredictor) -> None:
    assert predictor.tasklet_ms(WHOLE, "forward") == pytest.approx(TASKLETS["forward"] * 1.02, rel=0.005)
    alone, beside = predictor.tasklet_ms(HALF, "forward"), predictor.tasklet_ms(HALF, "forward", *SIZE)
    assert alone == pytest.approx(TASKLETS["forward"] * 1.1 * SMS / 68, rel=0.02), "the tail is each layout's own"
    assert beside == pytest.approx(1.1 * alone, rel=0.05)


def test_what_an_optimizer_step_takes_on_a_part_tells_nothing_of_a_layer() -> None:
    body = profile()
    quick = [
        TaskletPoint(layout=HALF, kind="optimizer", batch=b, kv_tokens=512 * b, ms=0.5, p99_ms=0.55) for b in (0, 1, 32)
    ]
    misled = TwoStagePredictor(body.model_copy(update={"tasklets": (*body.tasklets, *quick)}))
    for size in ((0, 0), SIZE):
        told = TwoStagePredictor(body).tasklet_ms(HALF, "forward", *size)
        assert misled.tasklet_ms(HALF, "forward", *size) == pytest.approx(told)


def test_promises_nothing_that_was_not_measured(predictor: TwoStagePredictor) -> None:
    unknown = Layout("split", 16, 116)
    assert predictor.decode_upper_ms(unknown, *SIZE, "forward") == inf
    assert predictor.decode_upper_ms(unknown, *SIZE, None) == inf
    assert predictor.decode_upper_ms(WHOLE, *SIZE, "forward") == inf
    assert predictor.tasklet_ms(unknown, "forward", *SIZE) == inf
    assert predictor.decode_upper_ms(WHOLE, 129, 1000, None) == inf
    assert predictor.decode_upper_ms(WHOLE, 8, 10**9, None) == inf
    assert predictor.decode_upper_ms(WHOLE, 8, 1000, None, 10**6) == inf


def test_a_profile_without_tasklets_on_the_whole_device_is_refused() -> None:
    body = profile()
    parts = tuple(tasklet for tasklet in body.tasklets if tasklet.layout != WHOLE)
    with pytest.raises(Invalid, match="forward"):
        TwoStagePredictor(body.model_copy(update={"tasklets": parts}))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(LAYOUTS), st.integers(1, CAPTURED[-1]), st.integers(1, 131_072), st.integers(0, CAPTURED[-1]),
    st.integers(0, 131_072), st.lists(st.floats(0.8, 1.3), max_size=5),
)  # fmt: skip
def test_a_prediction_never_falls_when_the_load_grows_whatever_was_learnt(
    layout: Layout, batch: int, kv: int, more_batch: int, more_kv: int, learnt: list[float]
) -> None:
    predictor: TwoStagePredictor = pickle.loads(FITTED)
    for ratio in learnt:
        predictor.observe_step(layout, *SIZE, ratio * predictor.decode_ms(layout, *SIZE))
    larger = predictor.decode_ms(layout, min(batch + more_batch, CAPTURED[-1]), min(kv + more_kv, 131_072))
    assert larger >= predictor.decode_ms(layout, batch, kv) - 1e-9


def test_learns_what_the_profile_got_wrong_about_a_partition_and_leaves_the_others(
    predictor: TwoStagePredictor,
) -> None:
    before = predictor.decode_ms(WHOLE, *SIZE)
    for _ in range(100):
        predictor.observe_step(HALF, *SIZE, 1.04 * step_ms(HALF, *SIZE, beside=True), "forward")
    bound = predictor.decode_upper_ms(HALF, *SIZE, "forward")
    assert bound == pytest.approx(1.04 * step_ms(HALF, *SIZE, beside=True), rel=0.03)
    assert predictor.decode_ms(WHOLE, *SIZE) == pytest.approx(before, rel=0.005)


def test_a_slower_device_is_told_from_one_partition_and_holds_for_all(predictor: TwoStagePredictor) -> None:
    beside = step_ms(HALF, *SIZE, beside=True)
    before = predictor.decode_ms(WHOLE, *SIZE)
    for _ in range(100):
        predictor.observe_step(HALF, *SIZE, beside, "forward")
    for _ in range(100):
        predictor.observe_step(HALF, *SIZE, 1.3 * beside, "forward")
    assert predictor.decode_ms(WHOLE, *SIZE) / before > 1.12


def test_a_partition_whose_steps_scatter_does_not_slow_the_device(predictor: TwoStagePredictor) -> None:
    """One step in five takes a quarter longer there, and none is much shorter."""
    beside, random = step_ms(HALF, *SIZE, beside=True), np.random.default_rng(3)
    before = predictor.decode_ms(WHOLE, *SIZE)
    for _ in range(1000):
        predictor.observe_step(HALF, *SIZE, beside * (1.25 if random.random() < 0.2 else 1.0), "forward")
    assert predictor.decode_ms(WHOLE, *SIZE) == pytest.approx(before, rel=0.02)


def test_counts_a_step_over_its_bound_as_a_miss(predictor: TwoStagePredictor) -> None:
    bound = predictor.decode_upper_ms(HALF, *SIZE, "forward")
    assert not predictor.observe_step(HALF, *SIZE, 0.999 * bound, "forward")
    bound = predictor.decode_upper_ms(HALF, *SIZE, "forward")
    assert predictor.observe_step(HALF, *SIZE, 1.001 * bound, "forward")


def settled(predictor: TwoStagePredictor) -> float:
    """After 200 steps next to finetuning that take what they should within one percent; what that is, in ms."""
    beside, random = step_ms(HALF, *SIZE, beside=True), np.random.default_rng(4)
    for _ in range(200):
        predictor.observe_step(HALF, *SIZE, beside * (1 + 0.01 * float(random.random())), "forward")
    return beside


def test_what_a_step_takes_beyond_its_bound_raises_all_bounds_until_some_steps_held(
    predictor: TwoStagePredictor,
) -> None:
    beside = settled(predictor)
    before = predictor.decode_upper_ms(WHOLE, *SIZE, None)
    assert predictor.observe_step(HALF, *SIZE, 1.1 * beside, "forward")
    raised = predictor.decode_upper_ms(WHOLE, *SIZE, None)
    assert 1.06 < raised / before < 1.13
    assert not predictor.observe_step(HALF, *SIZE, 1.1 * beside, "forward")  # which such a drop makes no surprise
    for _ in range(8):
        predictor.observe_step(HALF, *SIZE, beside, "forward")
    assert predictor.decode_upper_ms(WHOLE, *SIZE, None) / before < 1.03


def test_a_step_that_hangs_does_not_raise_other_bounds_beyond_what_a_clock_drops_by(
    predictor: TwoStagePredictor,
) -> None:
    beside = settled(predictor)
    before = predictor.decode_upper_ms(CONFINED, *SIZE, "forward")
    predictor.observe_step(HALF, *SIZE, 5 * beside, "forward")
    assert predictor.decode_upper_ms(CONFINED, *SIZE, "forward") / before < 1.25


def test_misses_soon_after_each_other_raise_bounds_for_good_as_one_does(predictor: TwoStagePredictor) -> None:
    bounds = []
    for slow in ((0,), (0, 2, 4)):
        fresh: TwoStagePredictor = pickle.loads(FITTED)
        beside = settled(fresh)
        for n in range(40):
            fresh.observe_step(HALF, *SIZE, (1.04 if n in slow else 1.0) * beside, "forward")
        bounds.append(fresh.decode_upper_ms(WHOLE, *SIZE, None))
    assert bounds[1] == pytest.approx(bounds[0], rel=0.004)


def test_one_step_in_a_hundred_outlasts_its_bound_however_layouts_are_chosen(predictor: TwoStagePredictor) -> None:
    random = np.random.default_rng(11)
    missed = []
    for n in range(12_000):
        layout = min(  # the winner's curse: whatever is bounded lowest, of layouts that are alike
            (HALF, CONFINED), key=lambda at: predictor.decode_upper_ms(at, *SIZE, "forward") / step_ms(at, *SIZE, True)
        )
        ms = step_ms(layout, *SIZE, beside=True) * (1 + 0.02 * float(random.standard_exponential()))
        if n >= 2000:
            missed.append(predictor.observe_step(layout, *SIZE, ms, "forward"))
        else:
            predictor.observe_step(layout, *SIZE, ms, "forward")
    assert 0.007 <= np.mean(missed) <= 0.013


@pytest.mark.parametrize("share", [0.05, 0.2])
def test_a_share_of_misses_that_was_asked_for_is_kept_though_misses_in_a_row_count_as_one(share: float) -> None:
    predictor, random = TwoStagePredictor(profile(), miss=share), np.random.default_rng(5)
    missed = [
        predictor.observe_step(
            HALF,
            *SIZE,
            step_ms(HALF, *SIZE, beside=True) * (1 + 0.03 * float(random.standard_exponential())),
            "forward",
        )
        for _ in range(6000)
    ]
    assert np.mean(missed[2000:]) == pytest.approx(share, rel=0.2)


def test_a_slowdown_that_grows_makes_it_stale_with_a_reason_and_learning_makes_it_fresh(
    predictor: TwoStagePredictor,
) -> None:
    beside, random = step_ms(HALF, *SIZE, beside=True), np.random.default_rng(2)
    stale = []
    for n in range(700):
        noise = 1 + 0.01 * float(random.standard_exponential())
        slower = 1 + 0.1 * min(max(0, n - 299), 8)
        predictor.observe_step(HALF, *SIZE, beside * noise * slower, "forward")
        stale.append(predictor.stale)
    assert not any(stale[:300])
    assert "outlasted" in stale[306]
    assert not any(stale[-100:])


def test_a_slowdown_that_comes_at_once_and_stays_is_bounded_after_three_steps(predictor: TwoStagePredictor) -> None:
    beside = settled(predictor)
    missed = [predictor.observe_step(HALF, *SIZE, 1.5 * beside, "forward") for _ in range(100)]
    assert missed[0] and sum(missed[:3]) == sum(missed) <= 3
    assert predictor.stale == ""


def test_distrust_comes_with_its_reason_and_goes_with_twenty_steps_that_hold(predictor: TwoStagePredictor) -> None:
    predictor.distrust("the clock went from 1980 to 1200 MHz")
    for _ in range(19):
        predictor.observe_step(WHOLE, *SIZE, step_ms(WHOLE, *SIZE, beside=False))
    assert "MHz" in predictor.stale
    predictor.observe_step(WHOLE, *SIZE, step_ms(WHOLE, *SIZE, beside=False))
    assert predictor.stale == ""


def test_a_bound_that_was_raised_once_is_forgotten_when_its_layout_does_not_run(predictor: TwoStagePredictor) -> None:
    beside = step_ms(HALF, *SIZE, beside=True)
    for n in range(40):
        predictor.observe_step(HALF, *SIZE, (1.5 if n == 20 else 1.0) * beside, "forward")
    assert predictor.decode_upper_ms(HALF, *SIZE, "forward") > 1.4 * beside
    for _ in range(4000):
        predictor.observe_step(WHOLE, *SIZE, step_ms(WHOLE, *SIZE, beside=False))
    assert predictor.decode_upper_ms(HALF, *SIZE, "forward") < 1.15 * beside


def test_a_kind_that_was_measured_by_itself_has_its_own_fit() -> None:
    body = profile()
    heavy = tuple(
        point.model_copy(update={"beside": "backward", "ms": 1.2 * point.ms, "p99_ms": 1.2 * point.p99_ms})
        for point in body.points
        if point.beside
    )
    predictor = TwoStagePredictor(body.model_copy(update={"points": (*body.points, *heavy)}))
    forward = predictor.decode_upper_ms(HALF, *SIZE, "forward")
    assert predictor.decode_upper_ms(HALF, *SIZE, "backward") == pytest.approx(1.2 * forward, rel=0.03)
    assert predictor.decode_upper_ms(HALF, *SIZE, "head") == pytest.approx(forward, rel=1e-6)


def test_the_few_steps_beside_a_head_do_not_bound_the_next_ones_by_themselves(predictor: TwoStagePredictor) -> None:
    """Of seventy tasklets four are heads: one late step in thirty would keep a layout's bound up for the next head."""
    beside = step_ms(HALF, *SIZE, beside=True)
    for n in range(700):
        head = n % 35 in (16, 17)
        predictor.observe_step(HALF, *SIZE, (1.12 if n == 17 else 1.0) * beside, "head" if head else "forward")
    assert predictor.decode_upper_ms(HALF, *SIZE, "head") < 1.03 * beside


def test_tasklet_times_are_corrected_too(predictor: TwoStagePredictor) -> None:
    for _ in range(600):
        predictor.observe_tasklet(WHOLE, "forward", 2 * TASKLETS["forward"])
    assert predictor.tasklet_ms(WHOLE, "forward") == pytest.approx(2 * TASKLETS["forward"], rel=0.02)
    predictor.observe_tasklet(Layout("split", 8, 124), "forward", 1.0)  # without a fit: not an error


def test_tasklets_behind_a_step_that_are_slow_together_are_bounded_together(predictor: TwoStagePredictor) -> None:
    rng, late, runs = np.random.default_rng(0), 0, 1000
    planned = [0.0] * 3  # an engine plans two steps before it has seen what they took
    for run in range(runs):
        planned = [*planned[1:], 20 * predictor.tasklet_ms(WHOLE, "forward")]
        slow = 1.12 if run % 100 < 3 else 1.0  # three steps of each hundred, as after a clock that drops
        took = [slow * TASKLETS["forward"] * rng.normal(1.0, 0.01) for _ in range(20)]
        late += run >= 100 and sum(took) > planned[0]
        for ms in took:
            predictor.observe_tasklet(WHOLE, "forward", ms)
        predictor.observe_step(WHOLE, *SIZE, step_ms(WHOLE, *SIZE, beside=False))
    assert late <= 0.015 * runs
    assert predictor.tasklet_ms(WHOLE, "forward") < 1.2 * TASKLETS["forward"]


def test_neither_a_hiccup_nor_another_job_leaves_long_bounds_behind_the_steps(predictor: TwoStagePredictor) -> None:
    def steps(count: int, ms: float) -> None:
        for _ in range(count):
            for _ in range(4):
                predictor.observe_tasklet(WHOLE, "forward", ms)
            predictor.observe_step(WHOLE, *SIZE, step_ms(WHOLE, *SIZE, beside=False))

    steps(120, TASKLETS["forward"])
    predictor.another_job({"forward": 3.0})
    steps(120, 3 * TASKLETS["forward"])
    assert predictor.tasklet_ms(WHOLE, "forward") < 3 * 1.1 * TASKLETS["forward"]
    steps(1, 60 * TASKLETS["forward"])
    steps(120, 3 * TASKLETS["forward"])
    assert predictor.tasklet_ms(WHOLE, "forward") < 3 * 1.3 * TASKLETS["forward"]


def test_tasklets_of_a_job_on_another_base_take_as_much_longer_as_was_measured_until_it_is_over(
    predictor: TwoStagePredictor,
) -> None:
    before = {kind: predictor.tasklet_ms(HALF, kind, *SIZE) for kind in TASKLETS}
    predictor.another_job({"forward": 3.0, "backward": 0.5})
    assert predictor.tasklet_ms(HALF, "forward", *SIZE) == pytest.approx(3 * before["forward"])
    assert predictor.tasklet_ms(HALF, "backward", *SIZE) == pytest.approx(before["backward"] / 2)
    assert predictor.tasklet_ms(HALF, "optimizer", *SIZE) == before["optimizer"]
    for _ in range(200):  # as predicted: nothing to learn
        predictor.observe_tasklet(WHOLE, "forward", 3 * TASKLETS["forward"])
    predictor.another_job({})
    after = predictor.tasklet_ms(WHOLE, "forward")
    assert after == pytest.approx(TASKLETS["forward"], rel=0.12)
