"""Moving averages of step and tasklet times, with a bound."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from core.policy.types import WHOLE
from core.predictor.moving import MovingPredictor


def test_nothing_is_promised_before_the_first_measurement() -> None:
    predictor = MovingPredictor()
    assert predictor.decode_upper_ms(WHOLE, 8, 100, None) == inf
    assert predictor.tasklet_ms(WHOLE, "forward") == inf


def test_follows_the_average_of_each_padded_batch() -> None:
    predictor = MovingPredictor()
    for _ in range(200):
        predictor.observe_step(WHOLE, 8, 100, 50.0)
        predictor.observe_step(WHOLE, 16, 100, 80.0)
    assert predictor.decode_ms(WHOLE, 8, 100) == pytest.approx(50.0)
    assert predictor.decode_ms(WHOLE, 16, 100) == pytest.approx(80.0)


def test_a_batch_not_seen_takes_the_next_larger_or_scales_the_largest() -> None:
    predictor = MovingPredictor()
    predictor.observe_step(WHOLE, 8, 100, 50.0)
    assert predictor.decode_ms(WHOLE, 4, 100) == 50.0
    assert predictor.decode_ms(WHOLE, 16, 100) == 100.0


def test_a_tasklet_kind_not_seen_counts_as_twice_the_slowest_seen() -> None:
    predictor = MovingPredictor()
    predictor.observe_tasklet(WHOLE, "forward", 10.0)
    assert predictor.tasklet_ms(WHOLE, "head") == 2 * predictor.tasklet_ms(WHOLE, "forward")


def test_about_one_step_in_a_hundred_outlasts_the_bound() -> None:
    rng = np.random.default_rng(3)
    predictor = MovingPredictor()
    noise = 50.0 * (1 + 0.05 * rng.standard_exponential(20_000))
    missed = [predictor.observe_step(WHOLE, 8, 100, float(ms)) for ms in noise]
    assert 0.005 <= np.mean(missed[1000:]) <= 0.015


def test_a_lasting_slowdown_is_followed_after_a_few_misses() -> None:
    predictor = MovingPredictor()
    for _ in range(300):
        predictor.observe_step(WHOLE, 8, 100, 50.0)
    missed = [predictor.observe_step(WHOLE, 8, 100, 75.0) for _ in range(200)]
    assert 1 <= sum(missed) <= 4
    assert predictor.decode_ms(WHOLE, 8, 100) == pytest.approx(75.0, rel=0.02)


def test_steps_that_keep_getting_slower_make_it_stale() -> None:
    predictor = MovingPredictor()
    for _ in range(300):
        predictor.observe_step(WHOLE, 8, 100, 50.0)
    for n in range(6):
        predictor.observe_step(WHOLE, 8, 100, 75.0 * 1.5**n)
    assert "outlasted" in predictor.stale


def test_one_hiccup_moves_the_average_by_less_than_a_twentieth() -> None:
    predictor = MovingPredictor()
    for _ in range(100):
        predictor.observe_step(WHOLE, 8, 100, 50.0)
    predictor.observe_step(WHOLE, 8, 100, 5000.0)
    assert predictor.decode_ms(WHOLE, 8, 100) <= 52.5


def test_another_job_starts_without_the_last_ones_tasklet_times() -> None:
    predictor = MovingPredictor()
    predictor.observe_tasklet(WHOLE, "forward", 10.0)
    predictor.forget_tasklets()
    assert predictor.tasklet_ms(WHOLE, "forward") == inf
