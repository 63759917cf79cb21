"""The rolling conformal quantile."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from core.predictor.window import RollingQuantile


def test_is_empty_at_first_then_the_largest_until_there_are_enough() -> None:
    window = RollingQuantile(size=200, miss=0.1)
    assert window.value is None and window.enough == 9
    for x in (3.0, 1.0, 2.0):
        window.push(x)
    assert window.value == 3.0


@given(st.lists(st.floats(0, 10), min_size=1, max_size=120), st.integers(1, 40), st.sampled_from([0.01, 0.05, 0.2]))
def test_at_most_its_share_of_the_window_lies_above(values: list[float], size: int, miss: float) -> None:
    window = RollingQuantile(size, miss)
    for x in values:
        window.push(x)
    kept = values[-size:]
    assert len(window) == len(kept)
    assert window.value in kept
    assert sum(x > window.value for x in kept) <= miss * (len(kept) + 1)


def test_forgets_the_larger_half_of_what_lies_above_a_limit() -> None:
    window = RollingQuantile(size=10, miss=0.1)
    for x in (9.0, 1.0, 7.0, 2.0, 8.0):
        window.push(x)
    window.forget_above(2.0)
    assert len(window) == 3 and window.value == 7.0
    for x in (3.0, 4.0):
        window.push(x)
    assert window.value == 7.0
    window.forget_above(7.0)
    assert len(window) == 5, "nothing lies above"
    for _ in range(3):
        window.forget_above(2.0)
    assert len(window) == 2 and window.value == 2.0
    window.forget_above(0.0)
    window.forget_above(0.0)
    assert len(window) == 0 and window.value is None
