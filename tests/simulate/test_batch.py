"""Facts about the running batch, against a plain re-telling that walks over every request."""

from __future__ import annotations

import random
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.simulate.batch import Request, RunningBatch
from core.workload.arrivals import Arrival

TARGET = 10.0


def running(requests: list[Request]) -> list[Request]:
    return [request for request in requests if request.ends >= 0]


def held(request: Request, step: int) -> int:
    return request.input_tokens + request.emitted + step - request.since


@settings(deadline=None)
@given(
    st.lists(st.builds(Arrival, st.floats(0, 0.3), st.integers(1, 50), st.integers(1, 30)), max_size=20).map(sorted),
    st.integers(0, 10_000),
)
def test_its_sums_are_those_of_its_requests(arrivals: list[Arrival], seed: int) -> None:
    chance = random.Random(seed)
    batch = RunningBatch(arrivals, TARGET)
    seen: list[Request] = []
    now = 0.0
    for _ in range(120):
        batch.arrive(now, with_first_token=True)
        while batch.waiting and chance.random() < 0.7:
            request = batch.take()
            if request not in seen:
                seen.append(request)
            batch.join(request, now)
        if batch.size and chance.random() < 0.15:
            batch.retract()
        runs = running(seen)
        assert batch.size == len(runs)
        assert batch.kv_tokens == sum(held(r, batch.step) for r in runs)
        assert batch.max_kv() == max((held(r, batch.step) for r in runs), default=0)
        slack = [r.first_ms + TARGET * (r.emitted + batch.step - r.since) - now for r in runs]
        assert batch.slack_ms(now) == pytest.approx(min(slack, default=inf))
        assert batch.waiting_tokens == sum(r.input_tokens + r.emitted for r in batch.waiting)
        now += chance.uniform(1, 20)
        batch.stepped(now)
    assert batch.arrived == len(arrivals)
    assert len(batch.finished) + batch.size + len(batch.waiting) == batch.arrived
    assert all(request.emitted == request.output_tokens for request in batch.finished)


def test_a_retracted_request_goes_first_and_keeps_its_tokens() -> None:
    batch = RunningBatch([Arrival(0.0, 5, 9), Arrival(0.0, 6, 9), Arrival(0.0, 7, 9)], TARGET)
    batch.arrive(0.0, with_first_token=True)
    for _ in range(2):
        batch.join(batch.take(), 0.0)
    batch.stepped(1.0)
    retracted = batch.retract()
    assert (retracted.number, retracted.emitted) == (1, 2)
    assert batch.waiting[0] is retracted
    batch.join(batch.take(), 1.0)
    for step in range(8):
        batch.stepped(2.0 + step)
    assert {r.number: r.last_ms for r in batch.finished} == {0: 8.0, 1: 8.0}


def test_a_request_of_one_token_that_came_with_it_is_done() -> None:
    batch = RunningBatch([Arrival(0.5, 5, 1)], TARGET)
    batch.arrive(500.0, with_first_token=True)
    assert [r.number for r in batch.finished] == [0]
    assert batch.size == 0
