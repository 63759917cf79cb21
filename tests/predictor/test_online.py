"""Corrections and bounds that are learnt while steps run."""

from __future__ import annotations

import numpy as np
import pytest

from core.predictor.online import Bound, Scale


def test_a_correction_averages_its_first_measurements() -> None:
    scale = Scale(forgetting=0.98, variance=1.0)
    for _ in range(20):
        scale.learn(1.1 / scale.value)
    assert scale.value == pytest.approx(1.1, rel=0.01)


def test_a_correction_follows_a_change_and_forgets() -> None:
    scale = Scale(forgetting=0.9, variance=0.1)
    for truth in [1.0] * 100 + [1.2] * 60:
        scale.learn(truth / scale.value)
    assert scale.value == pytest.approx(1.2, rel=0.01)


def test_one_hiccup_moves_a_settled_correction_by_a_few_percent() -> None:
    scale = Scale(forgetting=0.9, variance=0.1)
    for truth in [1.0] * 100 + [50.0]:
        scale.learn(truth / scale.value)
    assert 1.0 < scale.value < 1.04


def test_a_bound_starts_with_what_was_known_before() -> None:
    assert Bound([1.2, 1.3], miss=0.01).factors == [1.2, 1.3]


def test_few_measurements_can_raise_a_bound_but_not_lower_it() -> None:
    bound = Bound([1.2, 1.2], miss=0.01)
    for ratio in (0.9, 1.0, 0.95):
        bound.learn(0, ratio)
    assert bound.factors[0] == 1.2
    bound.learn(0, 1.5)
    assert bound.factors == [1.5, 1.2]


def test_a_bucket_with_few_measurements_borrows_those_of_all_buckets() -> None:
    bound = Bound([2.0, 2.0], miss=0.1)
    for _ in range(20):
        bound.learn(0, 1.05)
    bound.learn(1, 1.01)
    assert bound.factors == [1.05, 1.05]


def test_with_enough_measurements_the_share_asked_for_lies_above() -> None:
    random = np.random.default_rng(5)
    bound, missed = Bound([1.0], miss=0.01), 0
    for n in range(20_000):
        ratio = 1 + 0.05 * float(random.standard_exponential())
        missed += n >= 500 and ratio > bound.factors[0]
        bound.learn(0, ratio)
    assert 0.007 <= missed / 19_500 <= 0.013


def test_what_is_not_measured_any_more_fades_back_to_what_was_known_before() -> None:
    bound = Bound([1.2], miss=0.01)
    for _ in range(300):
        bound.learn(0, 1.6)
    for _ in range(10):
        bound.fade()
    assert bound.factors == [1.2]
