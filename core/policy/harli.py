"""Harli (the paper, section 5): the partition that trains fastest among those whose predicted step holds the target.

Each step asks the two-stage predictor for the bound of a decode step beside the next tasklet on every split; the
largest finetune part whose bound is within the slack is used, and kept busy. Nothing runs between steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.policy.fit import NO_MEMORY, blocked, idle, keep_busy, retreat, splits, start_ms
from core.policy.shares import NO_SHARES, Shares, charge, next_job
from core.policy.types import JobView, Layout, Predictor, StepPlan, StepState


@dataclass(frozen=True, slots=True)
class Knobs:
    """idle_ms: the longest run of tasklets at once when nothing decodes; quantum_tokens: finetune tokens of a turn of a
    tenant of weight 1."""

    idle_ms: float = 20.0
    quantum_tokens: float = 4096.0


KNOBS = Knobs()
MEMORY: Shares = NO_SHARES


def plan(state: StepState, predictor: Predictor, memory: Shares, knobs: Knobs = KNOBS) -> tuple[StepPlan, Shares]:
    """The largest finetune part that holds the target, or decode alone."""
    if reason := blocked(state, predictor):
        return StepPlan(retreat(state, predictor), pause=True, reason=reason), memory
    job, shares = next_job(state, memory, knobs.quantum_tokens)
    if job is None:
        return StepPlan(retreat(state, predictor), pause=True, reason=NO_MEMORY), shares
    if not state.batch:
        answer = idle(job, predictor, state, knobs.idle_ms)
        return answer, charge(shares, job, answer.after)
    layout = _largest(state, predictor, job)
    if layout is None:
        return StepPlan(
            retreat(state, predictor), job=job.job_id, pause=True, reason="no partition holds the target"
        ), shares
    count = keep_busy(state, predictor, job, layout)
    reason = f"largest finetune part within {min(state.slack_ms, default=0.0):.1f} ms"
    return StepPlan(layout, beside=count, job=job.job_id, reason=reason), charge(shares, job, count)


def _largest(state: StepState, predictor: Predictor, job: JobView) -> Layout | None:
    if not job.tasklets:
        return None
    slack = min(state.slack_ms, default=float("inf"))
    for layout in splits(state.layouts):
        step = predictor.decode_upper_ms(layout, state.padded, state.kv_tokens, job.tasklets[0], state.max_kv)
        if start_ms(state, layout) + step <= slack:
            return layout
    return None
