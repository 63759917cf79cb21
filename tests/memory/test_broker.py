"""The broker: the KV cache comes first, finetuning gets what it does not need, nothing goes back and forth."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from core.memory.broker import Decision, FinetuneView, KvView, Ledger, Marks, decide, least_rows

MARKS = Marks(low=0.05, high=0.15, least=0.25, calm_s=3.0)
KV = KvView(rows=40, most=40, fewest=2, row_tokens=100, row_pages=6, last_pages=6, used=0, queued=0, growth=0)
JOB = FinetuneView(present=True, wanted=30, state=4, activations=0)


def at(kv: KvView, finetune: FinetuneView, spare: int = 0, now: float = 100.0, grown_at: float = 0.0) -> Decision:
    return decide(kv, finetune, spare, MARKS, Ledger(grown_at), now)[0]


def test_without_a_job_the_kv_cache_gets_every_page() -> None:
    assert at(replace(KV, rows=30), FinetuneView(), spare=60).rows == 40
    assert at(replace(KV, rows=39), FinetuneView(), spare=5).rows == 39


def test_a_last_row_that_is_smaller_takes_fewer_pages() -> None:
    kv = replace(KV, rows=39, last_pages=2, fewest=40)
    assert at(kv, FinetuneView(), spare=2).rows == 40
    assert at(kv, JOB, spare=2).rows == 40
    assert at(replace(kv, rows=38), replace(JOB, state=0), spare=7).rows == 39
    assert at(replace(kv, rows=38), replace(JOB, state=0), spare=8).rows == 40


def test_a_job_gets_spare_pages_first_and_then_rows_that_the_kv_cache_does_not_need() -> None:
    assert at(KV, JOB, spare=30) == Decision(40, grant=30, reason="spare pages")
    asked = at(KV, JOB, spare=5)
    assert (asked.rows, asked.grant) == (35, 0)
    assert at(replace(KV, rows=35), JOB, spare=35).grant == 30


def test_a_job_that_cannot_have_all_it_wants_takes_nothing() -> None:
    busy = replace(KV, used=3300)
    assert at(busy, JOB) == Decision(40)
    assert at(replace(busy, used=2900), JOB).rows == 35


def test_finetuning_never_gets_the_last_quarter() -> None:
    greedy = replace(JOB, wanted=30 * 6)
    assert at(KV, greedy).rows == 10
    assert at(KV, replace(JOB, wanted=30 * 6 + 1)).rows == 40
    assert least_rows(KV.most, MARKS) == 10


def test_below_the_low_mark_memory_is_taken_in_order() -> None:
    short = replace(KV, rows=20, used=1850)
    holds = FinetuneView(present=True, state=60, activations=60)
    spare = at(short, holds, spare=60)
    assert (spare.rows, spare.drop_activations, spare.swap_out) == (25, False, False)
    assert at(replace(short, used=1799), holds, spare=60).rows == 20
    micro_batch = at(short, holds, spare=0)
    assert (micro_batch.rows, micro_batch.drop_activations, micro_batch.swap_out) == (25, True, False)
    job = at(replace(short, queued=1500), holds, spare=0)
    assert (job.rows, job.drop_activations, job.swap_out) == (40, True, True)
    assert "the job's state moves to host memory" in job.reason


def test_a_request_that_needs_more_than_the_pool_is_room_made_for_at_once() -> None:
    assert at(replace(KV, rows=12, fewest=33), FinetuneView(present=True, activations=200)).rows == 33


def test_what_was_taken_is_not_given_back_until_it_is_calm() -> None:
    kv = replace(KV, used=500)
    assert at(kv, JOB, now=102.0, grown_at=100.0).rows == 40
    assert at(kv, JOB, now=103.0, grown_at=100.0).rows == 35


views = st.builds(
    KvView,
    rows=st.integers(1, 40),
    most=st.just(40),
    fewest=st.integers(1, 40),
    row_tokens=st.just(100),
    row_pages=st.just(60),
    last_pages=st.integers(1, 60),
    used=st.integers(0, 4000),
    queued=st.integers(0, 9000),
    growth=st.integers(0, 9000),
)
jobs = st.one_of(
    st.just(FinetuneView()),
    st.builds(
        FinetuneView,
        present=st.just(True),
        wanted=st.integers(0, 2400),
        state=st.integers(0, 300),
        activations=st.integers(0, 1500),
    ),
)


@given(kv=views, finetune=jobs, spare=st.integers(0, 2400), now=st.floats(0, 10))
@settings(max_examples=200, deadline=None)
def test_every_decision_can_be_carried_out_and_keeps_the_order(
    kv: KvView, finetune: FinetuneView, spare: int, now: float
) -> None:
    said, ledger = decide(kv, finetune, spare, MARKS, Ledger(5.0), now)
    freed = finetune.activations * said.drop_activations + finetune.state * said.swap_out
    assert kv.rows <= said.rows <= kv.reach(spare + freed) or said.rows < kv.rows
    assert said.grant in (0, finetune.wanted) and said.grant <= spare
    assert not (said.grant and said.rows != kv.rows)
    if said.swap_out:  # only for rows that activations alone would not give
        assert said.rows > kv.reach(spare + finetune.activations)
    if said.drop_activations and not said.swap_out:
        assert said.rows > kv.reach(spare)
    need = kv.used + max(kv.queued, kv.growth)
    if said.rows < kv.rows:
        assert said.rows * kv.row_tokens - need >= MARKS.high * 4000 and said.rows >= max(kv.fewest, 10)
        assert spare + (kv.rows - said.rows) * kv.row_pages >= finetune.wanted
    short = kv.rows * kv.row_tokens - need < MARKS.low * 4000 or kv.rows < kv.fewest
    if short and kv.rows < kv.most:
        assert ledger.grown_at == now
        wished = min(kv.most, max(kv.fewest, -(-(need + 600) // 100), kv.rows))
        assert said.rows >= min(wished, kv.reach(spare + finetune.activations + finetune.state))


@given(
    load=st.lists(st.tuples(st.integers(0, 3900), st.integers(1, 60)), min_size=1, max_size=8),
    wants=st.integers(1, 200),
)
@settings(max_examples=60, deadline=None)
def test_under_a_steady_load_memory_changes_hands_once(load: list[tuple[int, int]], wants: int) -> None:
    """A loop of the broker and an arena: for each stretch of steady load, the KV cache grows or shrinks, not both."""
    rows, held, capacity = 40, 0, 240
    ledger, now = Ledger(), 0.0
    for used, seconds in load:
        moves: list[int] = []
        for _ in range(seconds * 5):
            now += 0.2
            finetune = FinetuneView(True, wanted=0 if held else wants, state=0, activations=held)
            kv = replace(KV, rows=rows, used=min(used, rows * 100))
            said, ledger = decide(kv, finetune, capacity - rows * 6 - held, MARKS, ledger, now)
            if said.drop_activations:
                held = 0
            if said.rows != rows:
                moves.append(1 if said.rows > rows else -1)
            rows, held = said.rows, held + said.grant
            assert rows * 6 + held <= capacity
        assert sum(one != other for one, other in pairwise(moves)) <= 1
        if used + 200 > rows * 100:
            assert held == 0 or rows == 40
