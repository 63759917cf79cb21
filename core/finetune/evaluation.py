"""What evaluations decide: which step was the best so far, and whether it is time to stop."""

from __future__ import annotations

import math

from core.finetune.checkpoint import Progress
from core.link.messages import JobSpec


def note(progress: Progress, step: int, loss: float) -> None:
    """Take in the evaluation after `step`. A loss that is no number is an evaluation without improvement."""
    progress.evaluated_at = step
    if math.isfinite(loss) and (progress.best_loss is None or loss < progress.best_loss):
        progress.best_loss, progress.best_step, progress.stale = loss, step, 0
    else:
        progress.stale += 1


def exhausted(progress: Progress, spec: JobSpec) -> bool:
    """Whether as many evaluations in a row brought no improvement as the job has patience for."""
    return spec.patience > 0 and progress.stale >= spec.patience


def decides(spec: JobSpec) -> bool:
    """Whether something hangs on an evaluation, so that no further step may be launched before its result is known."""
    return spec.patience > 0 or spec.keep_best or spec.sample


def why_stopped(progress: Progress) -> str:
    """Of a job whose patience is exhausted, in words."""
    best = f"{progress.best_loss:.4f}, at step {progress.best_step}" if progress.best_loss is not None else "no number"
    return (
        f"stopped early at step {progress.step}: the evaluation loss has not fallen in {progress.stale} evaluations; "
        f"its lowest was {best}"
    )
