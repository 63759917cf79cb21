"""What a captured job makes of evaluations while the device is behind: on paper, since only the order matters here.
That its figures are right is tested on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from core.finetune.captured import Slot, StepResult
from core.finetune.captured_job import CapturedJob
from core.finetune.trainer import Metric
from core.intake.packing import MicroBatch
from core.link.messages import JobSpec
from tests.finetune import small


class PaperProgram(NamedTuple):
    tokens: int
    micro_batches: int
    trains: bool

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("forward", "head", "backward", "optimizer") if self.trains else ("forward", "head")


class PaperState:
    """A copy of nothing."""

    def adapter(self, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return like

    def optimizer(self, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {f"master.{name}": tensor.float().contiguous() for name, tensor in like.items()}


class PaperDevice:
    """In the place of `CapturedTrainer`: evaluations give `losses` in turn, results come when `arrived` is called."""

    slot = Slot(8, 32)
    streamed = None

    def __init__(self, losses: Sequence[float]) -> None:
        self._losses = list(losses)
        self._program: PaperProgram | None = None
        self._queued: list[StepResult] = []
        self._finished: list[StepResult] = []

    def load_job(self, *_: Any, **__: Any) -> None:
        """Nothing to load."""

    def program(self, batches: Sequence[MicroBatch], learning_rate: float | None) -> PaperProgram:
        return PaperProgram(sum(batch.tokens for batch in batches), len(batches), learning_rate is not None)

    def load(self, program: PaperProgram) -> tuple[str, ...]:
        self._program = program
        return program.kinds

    def there(self, kinds: Sequence[str]) -> int:
        return len(kinds)

    def leave_off(self, partition: int) -> None:
        """Nothing is under way."""

    def launch(self, partition: int, index: int) -> None:
        program = self._program
        assert program is not None
        if index == len(program.kinds) - 1:
            loss, norm = (3.0, 1.0) if program.trains else (self._losses.pop(0), None)
            self._queued.append(StepResult(program.tokens, program.micro_batches, loss, norm))

    def arrived(self) -> None:
        """The device has come to the end of what was launched."""
        self._finished, self._queued = self._finished + self._queued, []

    def results(self) -> list[StepResult]:
        found, self._finished = self._finished, []
        return found

    def job_state(self, partition: int = 0, *, away: bool = False) -> PaperState:
        return PaperState()


def make(losses: Sequence[float], spec: JobSpec, resume_from: Path | None = None) -> tuple[CapturedJob, PaperDevice]:
    device = PaperDevice(losses)
    job = CapturedJob(device, small.model(), spec, small.rows(), base_name="small", resume_from=resume_from)  # type: ignore[arg-type]
    return job, device


def spec(folder: Path, **changes: object) -> JobSpec:
    return small.spec(folder, max_steps=20, evaluation_fraction=0.25, evaluate_every=2, **changes)


def launch_all(job: CapturedJob) -> None:
    while job.launch(0) is not None:
        """As long as there is something."""


def run(job: CapturedJob, device: PaperDevice) -> list[Metric]:
    metrics: list[Metric] = []
    while not job.done:
        launch_all(job)
        device.arrived()
        metrics += job.take_metrics()
    return metrics


def test_a_policy_sees_into_the_step_that_is_packed_but_not_past_an_evaluation(tmp_path: Path) -> None:
    job, _ = make([1.0] * 20, spec(tmp_path))
    step = ("forward", "head", "backward", "optimizer")
    job._ahead.result()  # type: ignore[union-attr]  # it is packed in a thread of its own
    assert job.upcoming(3) == step[:3]
    assert job.upcoming(6) == (*step, *step[:2])
    assert [job.launch(0) for _ in range(6)] == [*step, *step[:2]]
    assert job.upcoming(9) == step[2:], "an evaluation follows the second step"
    launch_all(job)
    assert job.upcoming(9) == ()


def test_nothing_is_launched_past_an_evaluation_that_decides(tmp_path: Path) -> None:
    job, device = make([1.0, 2.0], spec(tmp_path, patience=1))
    launch_all(job)
    assert job.progress.step == 2 and job.upcoming(9) == () and not job.done
    assert job.snapshot().progress.evaluated_at == -1, "its result is not known: whoever resumes evaluates again"
    device.arrived()
    job.take_metrics()
    assert job.snapshot().progress.evaluated_at == 2 and job.upcoming(1) == ("forward",)
    launch_all(job)
    device.arrived()
    job.take_metrics()
    assert job.done and job.stopped_early
    assert (job.progress.step, job.progress.best_step, job.progress.best_loss) == (4, 2, 1.0)
    job.close()


def test_evaluations_that_decide_nothing_hold_nothing_up(tmp_path: Path) -> None:
    job, device = make([1.0] * 10, spec(tmp_path))
    launch_all(job)
    assert job.progress.step == 20
    device.arrived()
    evaluated = [metric.step for metric in job.take_metrics() if metric.eval_loss is not None]
    assert evaluated == list(range(2, 21, 2)) and job.progress.best_step == 2
    job.close()


@pytest.mark.parametrize("known", [True, False])
def test_a_resumed_job_counts_every_evaluation_once(known: bool, tmp_path: Path) -> None:
    losses = [5.0, 4.0, 4.5, 4.6]
    wanted = spec(tmp_path, patience=2)
    alone, device = make(losses, wanted)
    run(alone, device)
    job, device = make(losses, wanted)
    while job.progress.step < 6:
        launch_all(job)
        if job.progress.step < 6 or known:
            device.arrived()
            job.take_metrics()
    path = job.snapshot().write(tmp_path)
    resumed, device = make(losses[3:] if known else losses[2:], wanted, path)
    run(resumed, device)
    for name in ("step", "best_step", "best_loss", "stale", "evaluated_at"):
        assert getattr(resumed.progress, name) == getattr(alone.progress, name), name
    for each in (alone, job, resumed):
        each.close()
