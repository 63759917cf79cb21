"""Early stopping and the best evaluation: what they decide, and that a kill in between changes nothing."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from core.finetune import checkpoint, evaluation
from core.finetune.checkpoint import Progress
from core.finetune.trainer import Metric, Trainer
from core.link.messages import JobSpec
from tests.finetune import small


def noted(*losses: float) -> Progress:
    progress = Progress()
    for step, loss in enumerate(losses, 1):
        evaluation.note(progress, step, loss)
    return progress


def test_the_lowest_loss_is_the_best_and_the_first_of_equal_ones() -> None:
    progress = noted(3.0, 2.0, 2.5, 2.0)
    assert (progress.best_step, progress.best_loss, progress.stale) == (2, 2.0, 2)


def test_a_loss_that_is_no_number_is_no_improvement() -> None:
    progress = noted(math.nan, math.inf, 2.0, math.nan)
    assert (progress.best_step, progress.stale) == (3, 1)
    assert noted(math.nan).best_loss is None
    assert "no number" in evaluation.why_stopped(noted(math.nan))


@pytest.mark.parametrize(("patience", "stops"), [(0, False), (2, True), (3, False)])
def test_patience_counts_evaluations_in_a_row(patience: int, stops: bool, tmp_path: Path) -> None:
    assert evaluation.exhausted(noted(1.0, 2.0, 3.0), small.spec(tmp_path, patience=patience)) is stops


def overfitting(folder: Path, **changes: object) -> JobSpec:
    """A job whose evaluation loss soon rises."""
    fields = {"max_steps": 40, "evaluation_fraction": 0.5, "evaluate_every": 2, "learning_rate": 5e-2, "patience": 2}
    return small.spec(folder, **(fields | changes))


def run(trainer: Trainer, until: int | None = None) -> list[Metric]:
    metrics: list[Metric] = []
    while not trainer.done and (until is None or trainer.progress.step < until):
        trainer.run_next()
        metrics += trainer.take_metrics()
    return metrics


def make(spec: JobSpec, resume_from: Path | None = None) -> Trainer:
    return Trainer(small.model(), spec, small.rows(), base_name="small", resume_from=resume_from)


def test_a_job_ends_when_evaluations_stop_improving(tmp_path: Path) -> None:
    trainer = make(overfitting(tmp_path))
    metrics = run(trainer)
    losses = [(m.step, m.eval_loss) for m in metrics if m.eval_loss is not None]
    best = min(losses, key=lambda pair: pair[1])
    assert trainer.stopped_early and trainer.progress.step < 40
    assert (trainer.progress.best_step, trainer.progress.best_loss) == best
    assert [step for step, _ in losses][-2:] == [best[0] + 2, best[0] + 4]
    assert f"at step {best[0]}" in evaluation.why_stopped(trainer.progress)


def test_a_kill_anywhere_changes_neither_where_it_stops_nor_what_was_best(tmp_path: Path) -> None:
    alone = make(overfitting(tmp_path))
    run(alone)
    last = alone.progress.step
    # In the middle of a stretch; behind an evaluation's step, before and after the evaluation; at the very end.
    for steps, evaluated in ((1, False), (best := alone.progress.best_step or 0, False), (best, True), (last, False)):
        trainer = make(overfitting(tmp_path / "killed"))
        run(trainer, until=steps)
        while evaluated and trainer.progress.evaluated_at != steps:
            trainer.run_next()
        path = trainer.snapshot().write(tmp_path / "killed")
        resumed = make(overfitting(tmp_path / "killed"), path)
        run(resumed)
        got, expected = resumed.progress, alone.progress
        assert (got.step, got.best_step, got.best_loss, got.stale) == (
            expected.step, expected.best_step, expected.best_loss, expected.stale,
        ), f"killed at step {steps}"  # fmt: skip


def test_what_was_evaluated_and_is_needed_again_stays(tmp_path: Path) -> None:
    def kept() -> list[int]:
        return sorted(int(path.name[5:]) for path in (tmp_path / "evaluated").glob("step-*"))

    def evaluated(step: int, best: int) -> None:
        progress = Progress(step=step, evaluated_at=step, best_step=best)
        checkpoint.write_evaluated(tmp_path, progress, lambda folder: folder.mkdir())

    evaluated(2, 2)
    remembered = Progress(step=2, evaluated_at=2, best_step=2, fingerprint="f")
    checkpoint.write(tmp_path / "checkpoints", remembered, {}, lambda folder: folder.mkdir())
    for step in (4, 6, 8):
        evaluated(step, 4)
    # 2: a checkpoint may go back to it; 4: the best; 6 and 8: the last two.
    assert kept() == [2, 4, 6, 8]
    evaluated(10, 4)
    assert kept() == [2, 4, 8, 10]
