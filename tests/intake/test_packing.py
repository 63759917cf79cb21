from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import Invalid
from core.intake import packing
from core.intake.chat import Encoded

lengths = st.lists(st.integers(1, 64), max_size=300)


def encoded(length: int, *, first: int = 1, trained_from: int = 0) -> Encoded:
    ids = np.arange(first, first + length, dtype=np.int32)
    return Encoded(ids, np.arange(length) >= trained_from)


@given(lengths, st.integers(64, 200), st.integers(0, 2**31 - 1), st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_every_row_comes_once_an_epoch_and_fits(rows: list[int], size: int, seed: int, epoch: int) -> None:
    plan = packing.epoch_plan(rows, size, seed=seed, epoch=epoch)
    assert sorted(row for pack in plan for row in pack) == list(range(len(rows)))
    assert all(sum(rows[row] for row in pack) <= size for pack in plan)
    assert plan == packing.epoch_plan(rows, size, seed=seed, epoch=epoch)


def test_the_plan_is_the_same_on_every_machine() -> None:
    assert packing.epoch_plan([5, 3, 9, 7, 2, 4], 12, seed=1, epoch=0) == [[2, 1], [5, 4], [3, 0]]


def test_seed_and_epoch_change_the_order() -> None:
    rows = [10] * 100
    plans = [packing.epoch_plan(rows, 40, seed=seed, epoch=epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({str(plan) for plan in plans}) == 4


def test_micro_batches_are_well_filled() -> None:
    rows = np.random.default_rng(0).integers(20, 90, 5000).tolist()
    plan = packing.epoch_plan(rows, 256, seed=0, epoch=0)
    assert sum(rows) / (len(plan) * 256) > 0.97


def test_a_row_longer_than_a_micro_batch_is_named() -> None:
    with pytest.raises(Invalid, match="Row 2 has 300 tokens and a micro-batch 256") as caught:
        packing.epoch_plan([10, 20, 300], 256, seed=0, epoch=0)
    assert caught.value.param == "micro_batch_tokens"


def test_labels_are_the_next_trained_token_of_the_same_row() -> None:
    batch = packing.build([encoded(3, first=10, trained_from=1), encoded(4, first=20, trained_from=2)], 9)
    assert batch.ids.tolist() == [10, 11, 12, 20, 21, 22, 23, 0, 0]
    assert batch.labels.tolist() == [11, 12, -100, -100, 22, 23, -100, -100, -100]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1]
    assert batch.segments.tolist() == [0, 0, 0, 1, 1, 1, 1, -1, -1]
    assert (batch.tokens, batch.trained) == (7, 4)
    assert [array.dtype for array in (batch.ids, batch.labels, batch.positions, batch.segments)] == [
        np.int64,
        np.int64,
        np.int64,
        np.int32,
    ]


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), max_size=12))
def test_the_loss_counts_every_trained_token_but_a_rows_first(rows: list[tuple[int, int]]) -> None:
    pack = [encoded(length, trained_from=begin) for length, begin in rows]
    batch = packing.build(pack, 256)
    assert batch.trained == sum(int(row.trained[1:].sum()) for row in pack)
    assert batch.tokens == sum(length for length, _ in rows)


def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(Invalid, match="2 rows of together 7 tokens do not fit a micro-batch of 6"):
        packing.build([encoded(3), encoded(4)], 6)


@given(st.integers(0, 500), st.floats(0, 0.95), st.integers(0, 2**31 - 1))
def test_a_split_is_disjoint_complete_and_leaves_a_row_on_each_side(rows: int, fraction: float, seed: int) -> None:
    training, evaluation = packing.split(rows, fraction, seed)
    assert sorted(training + evaluation) == list(range(rows))
    assert (training, evaluation) == packing.split(rows, fraction, seed)
    if fraction > 0 and rows >= 2:
        assert training and evaluation
    else:
        assert not evaluation


def test_a_fraction_out_of_range_is_refused() -> None:
    with pytest.raises(Invalid, match=r"evaluation_fraction is 1\.0"):
        packing.split(10, 1.0, 0)
