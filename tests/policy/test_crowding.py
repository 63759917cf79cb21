"""How long steps may be so that the batch does not outgrow the engine."""

from __future__ import annotations

from math import inf

import pytest

from core.policy import bind
from core.policy.crowding import CALM, Crowding, after_step, longest_gap
from core.policy.types import JobView, StepState
from tests.policy.clockwork import LAYOUTS, Clockwork, state

JOB = state().jobs[0]


def settled(kv_tokens: int, gap_ms: float) -> Crowding:
    crowding = CALM
    for _ in range(2000):
        crowding = after_step(crowding, state(kv_tokens=kv_tokens, kv_tokens_per_page=16.0), gap_ms, 0.02)
    return crowding


def longest(free_pages: int, job: JobView = JOB) -> float:
    here = state(kv_tokens=40_000, kv_tokens_per_page=16.0, free_pages=free_pages)
    return longest_gap(settled(40_000, 20.0), here, job)


def test_steps_may_grow_as_far_as_the_kv_cache_may() -> None:
    assert longest(free_pages=2500) == pytest.approx(2 * longest(free_pages=0))  # as many tokens again
    assert 20.0 < longest(free_pages=0) < 25.0


def test_the_pages_that_the_job_needs_are_not_for_the_kv_cache() -> None:
    needy = JobView("job", JOB.tasklets, pages=1250)
    assert longest(2500, needy) == pytest.approx(longest(1250))


def test_a_batch_that_still_grows_counts_as_what_it_grows_to() -> None:
    growing = CALM
    for step in range(500):
        growing = after_step(growing, state(kv_tokens=100 * step, kv_tokens_per_page=16.0), 20.0, 0.02)
    here = state(kv_tokens=50_000, kv_tokens_per_page=16.0, free_pages=2500)
    assert longest_gap(growing, here, JOB) < 0.8 * longest_gap(settled(50_000, 20.0), here, JOB)


def test_without_shared_memory_steps_are_not_limited() -> None:
    assert longest_gap(settled(40_000, 20.0), state(free_pages=1), JOB) == inf
    assert longest_gap(CALM, state(kv_tokens_per_page=16.0), JOB) == inf


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
