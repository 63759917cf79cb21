"""The runtime over a device that works through a queue, in SGLang's overlap order: a real trainer, a real link, streams
on a clock that the test turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from core.finetune.trainer import Trainer
from core.link.messages import FromEngine, JobUpdate, SetTargets, StartJob, StopJob, Target, Telemetry, ToEngine
from core.link.transport import ControlEnd
from core.policy.types import WHOLE, TaskletKind
from core.runtime.executor import Executor
from core.runtime.runtime import Load, Prepared, Queued, Runtime
from tests.finetune import small
from tests.runtime.device import Clock, Event, Steady, Stream
from tests.runtime.link import PromptEnd
from tests.runtime.test_runtime import HELLO

DECODE_MS, TASKLET_MS = 10.0, 2.0


class Launched:
    """A real trainer, not of the eager kind for the runtime: each tasklet takes its time on a stream."""

    def __init__(self, trainer: Trainer, stream: Stream, fail_at: list[int]) -> None:
        self._trainer, self._stream, self._fail_at = trainer, stream, fail_at
        self.launched = 0

    def launch(self, partition: int) -> TaskletKind | None:
        assert partition == 0
        if self._trainer.done:
            return None
        if self.launched in self._fail_at:
            raise torch.OutOfMemoryError("no memory")
        self._stream.run(TASKLET_MS)
        self.launched += 1
        return self._trainer.run_next()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


class Bench:
    """Two requests that decode, and the control plane's end of the link."""

    def __init__(self, folder: Path) -> None:
        url = f"ipc://{folder}/link.sock"
        self.control, self.clock = ControlEnd(url), Clock()
        self.link = PromptEnd(url, HELLO.engine_id)
        self.clock.ms = 100_000.0
        self.decode, self.finetune = Stream("decode", self.clock), Stream("finetune", self.clock)
        self.fail_at: list[int] = []
        self.folder = folder
        self.executor = Executor(
            self.decode,
            {WHOLE: self.finetune},
            select=lambda layout: None,
            new_event=lambda: Event(self.clock),
            expectation=Steady(DECODE_MS, TASKLET_MS),
            clock=self.clock,
        )
        self.steps: list[tuple[float, float]] = []
        self.runtime = Runtime(
            Prepared(
                hello=HELLO,
                device=torch.device("cpu"),
                prepare=self._prepare,
                queued=Queued(self.executor, {WHOLE: 0}, lambda batch: 4),
            ),
            self.link,
            policy="tasklet_slices",
            margin=0.0,
            calibration_prefix="calibration",
            clock=self.clock,
        )
        self.runtime.finish_calibration()
        self.received: list[FromEngine] = []

    def _prepare(self, order: StartJob) -> Any:
        trainer = Trainer(small.model(), order.spec, small.rows(), base_name="small")
        return Launched(trainer, self.finetune, self.fail_at)

    def send(self, message: ToEngine) -> None:
        deadline = time.monotonic() + 5.0
        while not self.control.send(HELLO.engine_id, message):
            assert time.monotonic() < deadline
            self.receive()
        self.link.await_message()

    def receive(self) -> None:
        while len(self.received) < self.link.sent:
            got = self.control.receive(10_000)
            assert got is not None
            self.received.append(got[1])

    def load(self) -> Load:
        return Load(("a", "b"), 0, 0, 200, 100, 100, 1000)

    def step(self, ms: float = DECODE_MS) -> None:
        """One turn of the overlap loop: launch a step, then take the result of the one before."""
        self.runtime.decode_begins(self.load())
        self.steps.append(self.decode.run(ms))
        self.runtime.decode_launched()
        if len(self.steps) > 1:
            self.clock.ms = max(self.clock.ms, self.steps[-2][1])
            self.runtime.decode_ended([("a", False), ("b", False)], self.load())

    def idle(self) -> None:
        self.steps.clear()
        self.clock.ms = max(self.clock.ms, self.decode.until) + 1.0
        self.runtime.idle(Load((), 0, 0, 0, 0, 0, 1000))

    def until(self, kind: str, turn: Callable[[], None]) -> JobUpdate:
        deadline = time.monotonic() + 20.0
        while time.monotonic() < deadline:
            for message in self.received:
                if isinstance(message, JobUpdate) and message.kind == kind:
                    return message
            turn()
            self.receive()
        raise AssertionError(f"no {kind}: {[getattr(m, 'kind', type(m).__name__) for m in self.received]}")

    def start(self, **changes: object) -> None:
        self.send(StartJob(spec=small.spec(self.folder, **changes), token=1))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.runtime.close()
    bench.control.close()


def gaps(bench: Bench) -> list[float]:
    ends = [end for _, end in bench.steps]
    return [after - before for before, after in pairwise(ends)]


def test_a_job_runs_to_its_end_behind_the_steps_and_every_gap_holds_the_target(bench: Bench) -> None:
    bench.send(SetTargets(version=1, targets=(Target(kind="itl", ms=15.0),)))
    for _ in range(60):
        bench.step()
    bench.start(max_steps=2)
    done = bench.until("succeeded", bench.step)
    assert done.step == 2
    late = [gap for gap in gaps(bench) if gap > 15.0 + 1e-6]
    assert len(late) <= 0.02 * len(bench.steps)
    assert any(gap > DECODE_MS for gap in gaps(bench))


def test_every_tasklet_behind_a_step_is_reported_whoever_had_it_queued(bench: Bench) -> None:
    for _ in range(60):
        bench.step()
    bench.start(max_steps=2)

    def turn() -> None:
        bench.step()
        bench.executor.other_batch()  # the runtime does not hear of it

    bench.until("succeeded", turn)
    for _ in range(60):
        bench.step()
    bench.receive()
    reports = [message for message in bench.received if isinstance(message, Telemetry)]
    launched = sum(report.tasklets for report in reports)
    assert launched > 0
    assert sum(report.plan.after * report.decode_steps for report in reports) == pytest.approx(launched)


def test_when_nothing_decodes_the_device_is_kept_busy_within_the_bound(bench: Bench) -> None:
    bench.start(max_steps=2)
    queued: list[float] = []

    def turn() -> None:
        bench.idle()
        queued.append(bench.executor.queued_ms())

    bench.until("succeeded", turn)
    assert 0.0 < max(queued) <= 20.0 + TASKLET_MS


@pytest.mark.parametrize("after_prefill", [True, False])
def test_nothing_is_learnt_from_the_first_steps_after_a_prefill(bench: Bench, after_prefill: bool) -> None:
    for _ in range(60):
        bench.step()
    if after_prefill:
        bench.executor.other_batch()
    for _ in range(2):
        bench.step(150.0)  # the device has waited for its launch
    for _ in range(20):
        bench.step()
    bench.receive()
    told = [message.predicted_step_ms for message in bench.received if isinstance(message, Telemetry)][-1]
    assert told is not None
    assert (told == pytest.approx(DECODE_MS)) is after_prefill


@pytest.mark.parametrize("index", [0, 1, 5])
def test_a_failing_tasklet_ends_the_job_and_decode_is_alone_within_what_was_queued(bench: Bench, index: int) -> None:
    bench.fail_at.append(index)
    for _ in range(60):
        bench.step()
    bench.start(max_steps=5)
    failed = bench.until("failed", bench.step)
    assert failed.code == "out_of_memory"
    queued = bench.executor.queued_ms()
    assert queued <= 60.0 + TASKLET_MS
    for _ in range(2 + round(queued / DECODE_MS)):
        bench.step()
    bench.steps[:] = bench.steps[-1:]
    for _ in range(10):
        bench.step()
    assert gaps(bench) == [pytest.approx(DECODE_MS)] * 10


def test_a_stopped_job_leaves_nothing_behind(bench: Bench) -> None:
    bench.start(max_steps=50)
    bench.until("started", bench.idle)
    for _ in range(3):
        bench.idle()
    bench.send(StopJob(job_id=small.spec(bench.folder).job_id, token=1))
    bench.until("cancelled", bench.idle)
    bench.clock.ms += 100.0
    bench.idle()
    assert bench.executor.queued_ms() == 0.0
