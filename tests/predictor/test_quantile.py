"""Quantile regression behind the predictor's interface."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from core.policy.types import WHOLE, Layout
from core.predictor.quantile import QuantilePredictor
from tests.predictor.synthetic import LAYOUTS, SIZES, profile, step_ms

pytest.importorskip("sklearn", reason="the alternative predictor needs scikit-learn")
HALF = Layout("split", 64, 68)


@pytest.fixture(scope="module")
def predictor() -> QuantilePredictor:
    return QuantilePredictor(profile(tail=1.1))


def test_bounds_what_was_measured_by_its_p99(predictor: QuantilePredictor) -> None:
    ratios = [
        predictor.decode_upper_ms(layout, batch, batch * context, "forward", context)
        / step_ms(layout, batch, batch * context, beside=True)
        for layout in LAYOUTS[1:]
        for batch, context in SIZES
    ]
    assert 1.0 <= np.median(ratios) <= 1.25


def test_promises_nothing_outside_the_profile(predictor: QuantilePredictor) -> None:
    assert predictor.decode_upper_ms(HALF, 512, 1000, "forward") == inf
    assert predictor.decode_upper_ms(Layout("split", 8, 124), 8, 1000, "forward") == inf


def test_never_falls_when_the_load_grows(predictor: QuantilePredictor) -> None:
    bounds = [predictor.decode_upper_ms(HALF, 32, kv, "forward") for kv in range(1000, 130_000, 5000)]
    assert bounds == sorted(bounds)
    bounds = [predictor.decode_upper_ms(HALF, batch, 40_000, "forward") for batch in range(1, 129)]
    assert bounds == sorted(bounds)


def test_learns_when_it_is_fitted_again(predictor: QuantilePredictor) -> None:
    size = (32, 32 * 256)
    before = predictor.decode_upper_ms(HALF, *size, "forward")
    for _ in range(3000):
        predictor.observe_step(HALF, *size, 2 * before, "forward")
    assert predictor.decode_upper_ms(HALF, *size, "forward") == before
    assert "outlasted" in predictor.stale
    predictor.refit()
    assert predictor.decode_upper_ms(HALF, *size, "forward") > 1.8 * before


def test_tasklets_are_those_of_the_two_stage_predictor(predictor: QuantilePredictor) -> None:
    assert 1.65 < predictor.tasklet_ms(WHOLE, "forward") < 1.65 * 1.2
    assert predictor.layouts[0] == WHOLE
