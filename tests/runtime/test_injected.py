"""An order, or a failure, at every tasklet of a step: the job ends as told, and decode is alone at once."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from core.link.messages import JobUpdate, PauseJob, SetTargets, StartJob, StopJob, Target
from tests.finetune import small
from tests.runtime.test_queued import DECODE_MS, TASKLET_MS, Bench, Launched, bench, gaps  # noqa: F401

TASKLETS = 6  # of a step of the small model: two layers' forwards, the head, two backwards, the optimizer
ENDS = {"cancelled": StopJob(job_id="job", token=1), "paused": PauseJob(job_id="job", token=1)}


def one_a_step(bench: Bench) -> list[Launched]:  # noqa: F811
    """A target that leaves room for one tasklet a step; the trainers of the jobs to come."""
    made: list[Launched] = []
    prepare = bench.runtime._engine.prepare

    def kept(order: StartJob) -> Any:
        made.append(prepare(order))  # type: ignore[arg-type]
        return made[-1]

    object.__setattr__(bench.runtime._engine, "prepare", kept)
    bench.send(SetTargets(version=1, targets=(Target(kind="itl", ms=DECODE_MS + 1.6 * TASKLET_MS),)))
    for _ in range(60):
        bench.step()
    return made


def ended(bench: Bench, kind: str, since: int) -> JobUpdate:  # noqa: F811
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        for message in bench.received[since:]:
            if isinstance(message, JobUpdate) and message.kind == kind:
                return message
        bench.step()
        bench.receive()
    raise AssertionError(f"no {kind}")


def alone(bench: Bench) -> None:  # noqa: F811
    """Decode is as fast as without a job within what was queued, a step's worth."""
    assert bench.executor.queued_ms() <= TASKLET_MS
    for _ in range(2):
        bench.step()
    del bench.steps[:-1]
    for _ in range(5):
        bench.step()
    assert gaps(bench) == [pytest.approx(DECODE_MS)] * 5


@pytest.mark.parametrize("kind", ENDS)
def test_an_order_is_obeyed_at_every_tasklet(bench: Bench, kind: str) -> None:  # noqa: F811
    made = one_a_step(bench)
    for index in range(TASKLETS + 1):
        since, jobs = len(bench.received), len(made)
        bench.start(max_steps=50)
        while len(made) == jobs or made[-1].launched < index:
            bench.step()
            bench.receive()
        bench.send(ENDS[kind])
        ended(bench, kind, since)
        assert index <= made[-1].launched <= index + 2
        alone(bench)


def test_a_failure_at_every_tasklet_ends_the_job_and_nothing_else(bench: Bench) -> None:  # noqa: F811
    one_a_step(bench)
    for index in range(TASKLETS):
        since = len(bench.received)
        bench.fail_at[:] = [index]
        bench.start(max_steps=50)
        assert ended(bench, "failed", since).code == "out_of_memory"
        alone(bench)


def test_a_loss_that_is_no_number_ends_the_job_and_nothing_else(
    bench: Bench,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one_a_step(bench)
    broken = small.model()
    with torch.no_grad():
        broken.lm_head.weight.fill_(float("nan"))
    monkeypatch.setattr(small, "model", lambda *_, **__: broken)
    since = len(bench.received)
    bench.start(max_steps=50)
    assert ended(bench, "failed", since).code == "loss_not_finite"
    alone(bench)
