"""The executor on a GPU's own streams: order is by events alone, whatever each stream is kept waiting by."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from core.finetune import views
from core.finetune.captured import CapturedTrainer, Slot
from core.finetune.fused import FusedWeights
from core.partition import green
from core.partition.part import Partitions
from core.policy.types import WHOLE, Layout, StepPlan, TaskletKind
from core.runtime.executor import Executor, Size
from tests.finetune import small
from tests.finetune.test_captured import (
    ALPHA,
    RANK,
    STEPS,
    TOKENS,
    batches,
    parameters,
    plain,
    run,
    source,
)
from tests.runtime.device import Steady

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
LONGEST_CYCLES = 4_000_000  # about two milliseconds: several steps and tasklets
SIZE = Size(4, 100, 100)


@pytest.fixture(scope="module")
def partitions() -> Partitions:
    return green.make(torch.device("cuda", 0), 3)


def trainer_on(partitions: Partitions, model: Any, folder: Path) -> CapturedTrainer:
    served = small.Served(model).cuda()
    shared = views.shared_model(served, small.folder(model, folder))
    streams = list(dict.fromkeys(part.finetune for part in partitions.parts))
    return CapturedTrainer(FusedWeights.of(served, shared), Slot(RANK, TOKENS), streams)


class Outcome(NamedTuple):
    """The decode tensor after every step, the job's losses and its state at the end."""

    decoded: list[torch.Tensor]
    losses: list[float]
    state: dict[str, torch.Tensor]


class Engine:
    """A decode whose every step needs what the last one left, as a graph on each partition, and a job beside it."""

    def __init__(self, partitions: Partitions, trainer: CapturedTrainer, start: dict[str, torch.Tensor]) -> None:
        self.partitions, self.trainer, self.start = partitions, trainer, start
        self.stream = torch.cuda.Stream()
        self.tensor = torch.zeros(1 << 22, device="cuda")
        self.graphs = {part.layout: self._captured(part.decode or self.stream) for part in partitions.parts}
        self.steps = batches(6)

    def _captured(self, stream: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            self.tensor.mul_(1.25).add_(0.5).sin_()
        return graph

    def on(self, layout: Layout) -> AbstractContextManager[None]:
        return self.trainer.on(self._place(layout))

    def _place(self, layout: Layout) -> int:
        return self.trainer.streams.index(self.partitions.of(layout).finetune)

    def launch(self, layout: Layout) -> TaskletKind | None:
        """The executor asks for the job's next tasklet."""
        if not self._kinds:
            if not self._left:
                return None
            self._kinds, self._index = list(self.trainer.load_step(self._left.pop(0), 5e-3)), 0
        self.trainer.launch(self._place(layout), self._index)
        self._index += 1
        return self._kinds.pop(0)

    def run(self, *, delays: bool) -> Outcome:
        """Steps on layouts at random until the job is through; the plans do not depend on the delays."""
        plans, waits = random.Random(1), random.Random(2)
        self.trainer.load_job(self.start, scaling=ALPHA / RANK, weight_decay=0.01, max_grad_norm=1.0)
        self.tensor.zero_()
        torch.cuda.synchronize()
        self._left, self._kinds = list(self.steps), list[TaskletKind]()
        selected = WHOLE

        def select(layout: Layout) -> None:
            nonlocal selected
            selected = layout

        executor = Executor(
            self.stream,
            {part.layout: part.finetune for part in self.partitions.parts},
            select=select,
            new_event=lambda: torch.cuda.Event(enable_timing=True),
            expectation=Steady(0.1, 1.0),
            bound_ms=1e9,
        )
        decoded: list[torch.Tensor] = []
        while self._left or self._kinds:
            plan = StepPlan(plans.choice(self.partitions.layouts), plans.randrange(4), plans.randrange(3))
            if delays:
                for stream in (self.stream, *self.trainer.streams, torch.cuda.current_stream()):
                    if waits.random() < 0.3:
                        with torch.cuda.stream(stream):
                            torch.cuda._sleep(waits.randrange(LONGEST_CYCLES))
            executor.begin_step(plan.layout, SIZE)
            with torch.cuda.stream(self.stream):
                self.graphs[selected].replay()
                if len(decoded) % 8 == 0:
                    decoded.append(self.tensor[::4096].clone())
            executor.step_launched(plan, self)
            executor.collect()
        torch.cuda.synchronize()
        losses = [result.loss for result in self.trainer.results()]
        return Outcome(decoded, losses, self.trainer.job_state().optimizer(self.start))


def test_delays_on_any_stream_change_no_result(partitions: Partitions, tmp_path: Path) -> None:
    model = source("llama")
    engine = Engine(partitions, trainer_on(partitions, model, tmp_path), parameters(model))
    expected, got = engine.run(delays=False), engine.run(delays=True)
    assert len(expected.losses) == len(engine.steps)
    assert got.losses == expected.losses
    assert all(torch.equal(a, b) for a, b in zip(got.decoded, expected.decoded, strict=True))
    assert all(torch.equal(got.state[name], value) for name, value in expected.state.items())


class Sleeps:
    """Tasklets that take the next of `cycles` each, on the whole device."""

    def __init__(self, stream: torch.cuda.Stream, cycles: list[int]) -> None:
        self.stream, self.cycles = stream, cycles

    def on(self, layout: Layout) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream)

    def launch(self, layout: Layout) -> TaskletKind | None:
        if not self.cycles:
            return None
        torch.cuda._sleep(self.cycles.pop(0))
        return "forward"


def test_events_that_are_recorded_again_tell_every_tasklets_own_time() -> None:
    """Long ones are 50 times as long as short ones, so that none can be taken for its neighbour."""
    decode, stream, draw = torch.cuda.Stream(), torch.cuda.Stream(), random.Random(0)
    cycles = [draw.choice((200_000, 10_000_000)) for _ in range(400)]
    made = []

    def new_event() -> torch.cuda.Event:
        made.append(torch.cuda.Event(enable_timing=True))
        return made[-1]

    executor = Executor(
        decode, {WHOLE: stream}, select=lambda layout: None, new_event=new_event, expectation=Steady(0.5, 1.0),
        bound_ms=1e9,
    )  # fmt: skip
    work, ran = Sleeps(stream, list(cycles)), list[float]()
    while work.cycles:
        executor.begin_step(WHOLE, SIZE)
        with torch.cuda.stream(decode):
            torch.cuda._sleep(400_000)
        executor.step_launched(StepPlan(after=draw.randrange(6)), work)
        if draw.random() < 0.5:
            ran += [one.ms for one in executor.collect()[1]]
        if draw.random() < 0.1:
            executor.drain()
    executor.catch_up()
    executor.drain()
    ran += [one.ms for one in executor.collect()[1]]
    assert len(ran) == len(cycles)
    longest = max(ms for ms, count in zip(ran, cycles, strict=True) if count == min(cycles))
    assert longest < min(ms for ms, count in zip(ran, cycles, strict=True) if count == max(cycles))
    assert len(made) < len(cycles)


def test_fifty_steps_in_bf16_on_partitions_at_random_are_those_of_a_plain_loop(
    partitions: Partitions, tmp_path: Path
) -> None:
    """Losses step by step, and what both adapters predict on rows that neither was trained on: bf16 moves the weights
    themselves of any two loops apart."""
    *steps, held_out = batches(STEPS + 1)
    expected = plain(source("llama"), steps)
    trainer = trainer_on(partitions, source("llama"), tmp_path)

    def load(weights: dict[str, torch.Tensor]) -> None:
        trainer.load_job(weights, scaling=ALPHA / RANK, weight_decay=0.0, max_grad_norm=1.0)
        torch.cuda.synchronize()

    def predicted() -> float:
        for index in range(len(trainer.load_evaluation(held_out))):
            trainer.launch(0, index)
        torch.cuda.synchronize()
        (result,) = trainer.results()
        return result.loss

    load(expected.initial)
    before = predicted()
    losses = [result.loss for result in run(trainer, steps, total=STEPS, seed=7)]
    after = predicted()
    load(expected.final)
    assert losses == pytest.approx(expected.losses, rel=1e-2, abs=2e-3)
    assert after == pytest.approx(predicted(), rel=5e-2, abs=5e-3)
    assert after < 0.5 * before
