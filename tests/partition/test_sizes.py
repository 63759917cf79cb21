from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from core.partition.sizes import Granularity, decode_sizes


@given(st.integers(1, 300), st.integers(1, 16), st.integers(1, 16), st.integers(0, 12))
def test_every_split_leaves_both_sides_what_the_device_allows(sms: int, smallest: int, step: int, count: int) -> None:
    sizes = decode_sizes(Granularity(sms, smallest, step), count)
    assert len(sizes) <= count
    assert list(sizes) == sorted(set(sizes), reverse=True)
    for decode in sizes:
        assert decode % step == 0
        assert decode >= smallest
        assert sms - decode >= smallest


def test_an_h200_is_divided_from_a_seventh_to_three_quarters_for_finetuning() -> None:
    assert decode_sizes(Granularity(132, 8, 8), 6) == (112, 104, 96, 80, 64, 32)


def test_one_split_is_the_middle() -> None:
    assert decode_sizes(Granularity(132, 8, 8), 1) == (64,)


def test_a_device_too_small_to_be_split_has_no_split() -> None:
    assert decode_sizes(Granularity(8, 8, 8), 6) == ()
