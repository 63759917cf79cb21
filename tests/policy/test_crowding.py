"""How long steps may be so that the batch does not outgrow the engine."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.policy import bind
from core.policy.crowding import CALM, Crowding, after_step, frugal_gap, roomy_gap, share_with_memory
from core.policy.types import JobView, StepState
from tests.policy.clockwork import LAYOUTS, Clockwork, state

JOB = state().jobs[0]


def settled(kv_tokens: int, gap_ms: float) -> Crowding:
    crowding = CALM
    for _ in range(2000):
        crowding = after_step(crowding, state(kv_tokens=kv_tokens, kv_tokens_per_page=16.0), gap_ms, 0.02)
    return crowding


def roomy(free_pages: int, job: JobView = JOB) -> float:
    here = state(kv_tokens=40_000, kv_tokens_per_page=16.0, free_pages=free_pages)
    return roomy_gap(settled(40_000, 20.0), here, job)


def test_steps_may_grow_as_far_as_the_kv_cache_may() -> None:
    assert roomy(free_pages=2500) == pytest.approx(2 * roomy(free_pages=0))  # as many tokens again
    assert 20.0 < roomy(free_pages=0) < 30.0


def test_the_pages_that_the_job_needs_are_not_for_the_kv_cache() -> None:
    needy = JobView("job", JOB.tasklets, pages=1250)
    assert roomy(2500, needy) == pytest.approx(roomy(1250))


def test_a_batch_that_has_just_grown_counts_as_what_it_is() -> None:
    here = state(kv_tokens=50_000, kv_tokens_per_page=16.0, free_pages=2500)
    before, now = settled(10_000, 20.0), settled(50_000, 20.0)
    assert roomy_gap(before, here, JOB) == pytest.approx(roomy_gap(now, here, JOB), rel=0.01)


def test_without_shared_memory_steps_are_not_limited() -> None:
    assert roomy_gap(settled(40_000, 20.0), state(free_pages=1), JOB) == inf
    assert roomy_gap(CALM, state(kv_tokens_per_page=16.0), JOB) == inf
    assert frugal_gap(inf, 20.0, 0.25) == inf


def test_longer_steps_than_memory_has_room_for_are_paid_with_time_without_it() -> None:
    assert share_with_memory(30.0, 40.0, 10.0) == 1.0
    assert share_with_memory(40.0, 25.0, 10.0) == pytest.approx(0.5)  # half of the time at 40 ms, half at 10 ms
    assert 0.0 < share_with_memory(40.0, 5.0, 10.0) < 0.05


@given(st.floats(1, 200), st.floats(1, 200), st.floats(1, 200), st.floats(0, 50))
def test_the_share_never_rises_with_the_step_and_never_falls_with_the_room(
    gap: float, room: float, alone: float, more: float
) -> None:
    share = share_with_memory(gap, room, alone)
    assert 0.0 < share <= 1.0
    assert share_with_memory(gap, room + more, alone) >= share - 1e-12
    if gap > alone:
        assert share_with_memory(gap + more, room, alone) <= share + 1e-12


def test_what_runs_behind_steps_gets_less_of_the_memory_the_scarcer_it_is() -> None:
    assert frugal_gap(20.0, 20.0, 0.25) == 5.0
    assert frugal_gap(40.0, 20.0, 0.25) == 20.0
    assert frugal_gap(200.0, 20.0, 0.25) == 200.0


def test_hybrid_keeps_its_steps_short_enough_for_its_memory() -> None:
    policy = bind("hybrid")

    def gap(free_pages: int) -> float:
        """The gap that it settles at when the KV cache follows the length of the steps."""
        memory, device, kv_tokens, gap_ms = policy.MEMORY, Clockwork(), 4000.0, 6.0
        for _ in range(3000):
            kv_tokens += (500 * gap_ms - kv_tokens) / 100
            now: StepState = state(
                slack_ms=(60.0,), layouts=LAYOUTS, kv_tokens=int(kv_tokens), kv_tokens_per_page=16.0,
                free_pages=max(0, free_pages - int(kv_tokens / 16)),
            )  # fmt: skip
            plan, memory = policy.plan(now, device, memory)
            kinds = JOB.tasklets[plan.beside : plan.beside + plan.after]
            gap_ms = device.decode_upper_ms(plan.layout, 8, 0, "forward" if plan.beside else None) + sum(
                device.tasklet_ms(LAYOUTS[0], kind) for kind in kinds
            )
        return gap_ms

    assert gap(free_pages=10**6) > 25.0
    assert gap(free_pages=500) < 0.8 * gap(free_pages=10**6)
