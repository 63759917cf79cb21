"""Non-negative least squares."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from core.predictor.nnls import nnls


def test_finds_coefficients_that_are_not_negative() -> None:
    a = np.random.default_rng(0).random((40, 4))
    assert np.allclose(nnls(a, a @ [1.0, 0.0, 2.5, 0.3]), [1.0, 0.0, 2.5, 0.3], atol=1e-8)


def test_a_negative_coefficient_becomes_zero_and_the_others_make_up_for_it() -> None:
    a = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    assert np.allclose(nnls(a, np.array([3.0, 2.0, 1.0])), [2.0, 0.0])


@given(st.integers(0, 10_000), st.integers(1, 8), st.integers(1, 30))
def test_no_direction_that_keeps_signs_makes_the_fit_better(seed: int, columns: int, rows: int) -> None:
    random = np.random.default_rng(seed)
    a, y = random.normal(size=(rows, columns)), random.normal(size=rows)
    a = np.vstack([a, 1e-2 * np.eye(columns)])
    y = np.concatenate([y, np.zeros(columns)])
    x = nnls(a, y)
    downhill = a.T @ (y - a @ x)
    assert (x >= 0).all()
    assert (downhill <= 1e-6).all()
    assert np.abs(downhill[x > 0]).max(initial=0.0) <= 1e-6
