"""Tables over batch, KV tokens and the longest request."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.policy.types import WHOLE
from core.predictor.sizes import queue_tokens
from core.predictor.table import FactorTable, Grid, StepTable

GRID = Grid((1, 2, 4, 8, 16, 32), max_kv_tokens=65_536, max_kv=4096, sms=132, kv_heads=8)


def table(seed: int = 0, noise: float = 0.0) -> StepTable:
    random = np.random.default_rng(seed)
    by_kv, by_queue = GRID.by_kv_tokens(WHOLE, False), GRID.by_queue(WHOLE, False)
    rough = 1 + noise * random.random(len(by_kv))
    return StepTable(
        GRID, WHOLE, (5 + 0.1 * by_kv.batch + 1e-4 * by_kv.kv_tokens) * rough, 5 + 1e-3 * queue_tokens(by_queue, 8)
    )  # fmt: skip


def test_answers_what_it_was_made_of() -> None:
    assert table().ms(16, 10_000, 0) == pytest.approx(5 + 1.6 + 1.0, rel=2e-3)


def test_the_longest_request_counts_when_it_asks_for_more() -> None:
    assert table().ms(2, 4000, 4000) == pytest.approx(5 + 4.0, rel=5e-3)


def test_a_long_request_among_short_ones_adds_its_own_tokens_to_an_even_share_of_all() -> None:
    # 32 requests, 256 blocks on 132 SMs: two long ones one after the other if all were long
    assert table().ms(32, 32 * 3000, 3000) == inf
    assert table().ms(32, 65_536, 2048) == pytest.approx(5 + 3.2 + 6.5536, rel=5e-3)  # the tokens of all say more
    mixed = 5 + 1e-3 * (8 / 132 * 6000 + 4000)
    assert table().ms(16, 6000, 4000) == pytest.approx(5 + 1e-3 * 4000, rel=5e-3)  # a block an SM: no queue
    assert table().ms(32, 6000, 4000) == pytest.approx(mixed, rel=5e-3)


def test_a_batch_that_was_not_captured_is_the_next_larger_one() -> None:
    assert table().ms(9, 10_000, 0) == table().ms(16, 10_000, 0)


@pytest.mark.parametrize(("batch", "kv_tokens", "max_kv"), [(33, 100, 10), (8, 65_537, 10), (8, 5000, 4097)])
def test_outside_what_was_measured_nothing_is_promised(batch: int, kv_tokens: int, max_kv: int) -> None:
    assert table().ms(batch, kv_tokens, max_kv) == inf


def test_the_edge_itself_is_inside() -> None:
    assert table().ms(32, 65_536, 4096) < inf


@given(
    st.integers(0, 100), st.integers(1, 32), st.integers(0, 65_536), st.integers(0, 4096),
    st.integers(0, 31), st.integers(0, 65_536), st.integers(0, 4096),
)  # fmt: skip
def test_never_falls_when_batch_tokens_or_the_longest_request_grow(
    seed: int, batch: int, kv: int, longest: int, more_batch: int, more_kv: int, more_longest: int
) -> None:
    rough = table(seed, noise=0.3)
    larger = min(batch + more_batch, 32), min(kv + more_kv, 65_536), min(longest + more_longest, 4096)
    assert rough.ms(*larger) >= rough.ms(batch, kv, longest) - 1e-9


def test_a_factor_is_that_of_the_nearest_size() -> None:
    sizes = GRID.by_kv_tokens(WHOLE, True)
    factors = FactorTable(GRID, 2 + 0.1 * np.log2(sizes.batch))
    assert factors.factor(8, 3000) == pytest.approx(2.3)
    assert factors.factor(64, 3000) == inf


def test_every_size_has_a_load_bucket() -> None:
    made = table()
    buckets = {made.look_up(batch, kv, 0)[1] for batch in range(1, 33) for kv in range(0, 65_537, 512)}
    assert min(buckets) >= 0 and max(buckets) < GRID.buckets
    assert len({made.look_up(batch, kv, 0)[1] for batch, kv in ((4, 100), (32, 100), (32, 60_000))}) == 3
    batch, kv = GRID.bucket_middles()
    assert len(batch) == len(kv) == GRID.buckets
