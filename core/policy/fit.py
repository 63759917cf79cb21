"""How many of a job's next tasklets fit in a time."""

from __future__ import annotations

from core.policy.types import WHOLE, JobView, Predictor, StepState


def blocked(state: StepState, predictor: Predictor) -> str:
    """Why this step carries no finetuning whatever the policy, or an empty string."""
    if not state.jobs:
        return "no job"
    if state.prefill_waiting:
        return "prefill waits"
    if predictor.stale:
        return predictor.stale
    return ""


def fit(job: JobView, predictor: Predictor, budget_ms: float, start: int = 0) -> tuple[int, float]:
    """Tasklets of `job` from index `start` on that end within `budget_ms` on the whole device by their upper bounds,
    and the ms that they take."""
    bounds: dict[str, float] = {}
    count, used = 0, 0.0
    for kind in job.tasklets[start:]:
        ms = bounds.get(kind)
        if ms is None:
            ms = bounds[kind] = predictor.tasklet_ms(WHOLE, kind)
        if used + ms > budget_ms:
            break
        used += ms
        count += 1
    return count, used
