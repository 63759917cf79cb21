"""Facts about the figures of a run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.simulate.outcome import weighted_quantile

VALUES = st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5)), min_size=1, max_size=30)


@given(VALUES, st.floats(0.01, 0.99))
def test_a_weighted_quantile_is_that_of_the_values_repeated(pairs: list[tuple[float, int]], quantile: float) -> None:
    values, weights = (np.array(column, dtype=float) for column in zip(*pairs, strict=True))
    repeated = np.sort(np.repeat(values, weights.astype(int)))
    found = weighted_quantile(values, weights, quantile)
    assert (repeated <= found).mean() >= quantile - 1e-9
    assert (repeated < found).mean() <= quantile + 1e-9


def test_without_values_there_is_no_quantile() -> None:
    assert np.isnan(weighted_quantile(np.array([]), np.array([]), 0.5))


def test_weights_move_it() -> None:
    values = np.array([1.0, 2.0])
    assert weighted_quantile(values, np.array([9.0, 1.0]), 0.5) == 1.0
    assert weighted_quantile(values, np.array([1.0, 9.0]), 0.5) == pytest.approx(2.0)
