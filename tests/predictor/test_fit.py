"""The two-stage fit."""

from __future__ import annotations

import numpy as np
import pytest

from core.policy.types import WHOLE, Layout
from core.predictor.fit import TwoStage
from core.predictor.sizes import sizes_of
from tests.predictor.synthetic import LAYOUTS, SMS, profile, step_ms

POINTS = list(profile().points)
BETWEEN = [(4, 1024), (16, 512), (16, 2048), (48, 700), (100, 900)]


def errors(points: list, sizes: list[tuple[int, int]]) -> np.ndarray:
    model = TwoStage(points, SMS, kv_heads=8)
    asked = [
        (layout, beside, batch, batch * context, context)
        for layout in LAYOUTS
        for beside in (False, True)
        for batch, context in sizes
        if layout.kind != ("confined" if not beside else "whole")
    ]
    true = np.array([step_ms(layout, batch, kv, beside) for layout, beside, batch, kv, _ in asked])
    return np.abs(model.ms(sizes_of(asked, SMS)) / true - 1)


def test_between_the_points_of_a_device_that_follows_the_model_it_is_right() -> None:
    assert errors(POINTS, BETWEEN).max() < 0.01


def test_finds_the_coefficients_of_the_whole_device() -> None:
    constant, per_request, _, _, per_token, _ = TwoStage(POINTS, SMS, kv_heads=8).alone[float(SMS)]
    assert constant == pytest.approx(5.0, rel=0.02)
    assert per_request == pytest.approx(0.01, rel=0.15)
    assert per_token == pytest.approx(3e-5, rel=0.05)


def test_no_coefficient_is_negative() -> None:
    model = TwoStage(POINTS, SMS, kv_heads=8)
    assert all(value >= 0 for row in model.alone.values() for value in row)
    assert all(value >= 0 for row in model.phi.values() for value in row)


def test_half_of_the_points_are_enough() -> None:
    half = [POINTS[n] for n in np.random.default_rng(0).permutation(len(POINTS))[::2]]
    assert np.median(errors(half, BETWEEN)) < 0.01
    assert errors(half, BETWEEN).max() < 0.05


def test_a_partition_without_points_alone_follows_its_neighbours() -> None:
    part = Layout("split", 64, 68)
    others = [point for point in POINTS if point.layout != part or point.beside is not None]
    model = TwoStage(others, SMS, kv_heads=8)
    asked = sizes_of([(part, False, 32, 32 * 1024, 1024)], SMS)
    assert model.ms(asked)[0] == pytest.approx(step_ms(part, 32, 32 * 1024, False), rel=0.1)


def test_with_few_requests_the_longest_one_bounds_the_step() -> None:
    per_token = 3.5e-4  # of the longest request: blocks that do not fill the SMs wait for it
    points = [
        point.model_copy(update={"ms": max(point.ms, 5.0 + per_token * point.max_kv)})
        for point in POINTS
        if point.layout == WHOLE
    ]
    model = TwoStage(points, SMS, kv_heads=8)
    asked = [(WHOLE, False, 1, 3000, 3000), (WHOLE, False, 8, 8 * 1500, 1500)]
    true = [5.0 + per_token * 3000, 5.0 + per_token * 1500]
    assert np.allclose(model.ms(sizes_of(asked, SMS)), true, rtol=0.03)
