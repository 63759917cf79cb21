"""A fixed partition, whatever the load: what MPS with a fixed share of the SMs gives.

It asks neither the predictor nor the target; which partition suits a target has to be found out beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.policy.fit import NO_MEMORY, blocked, idle, keep_busy, retreat, splits
from core.policy.shares import NO_SHARES, Shares, charge, next_job
from core.policy.types import Predictor, StepPlan, StepState


@dataclass(frozen=True, slots=True)
class Knobs:
    """finetune_sms: SMs of the finetune part; the split that comes nearest is taken; idle_ms: the longest run of
    tasklets at once when nothing decodes; quantum_tokens: finetune tokens of a turn of a tenant of weight 1."""

    finetune_sms: int = 36
    idle_ms: float = 20.0
    quantum_tokens: float = 4096.0


KNOBS = Knobs()
MEMORY: Shares = NO_SHARES


def plan(state: StepState, predictor: Predictor, memory: Shares, knobs: Knobs = KNOBS) -> tuple[StepPlan, Shares]:
    """Tasklets that keep the fixed partition busy during this step."""
    if reason := blocked(state, predictor):
        return StepPlan(retreat(state, predictor), pause=True, reason=reason), memory
    parts = splits(state.layouts)
    if not parts:
        return StepPlan(pause=True, reason="the device has no partitions"), memory
    job, shares = next_job(state, memory, knobs.quantum_tokens)
    if job is None:
        return StepPlan(retreat(state, predictor), pause=True, reason=NO_MEMORY), shares
    if not state.batch:
        answer = idle(job, predictor, state, knobs.idle_ms)
        return answer, charge(shares, job, answer.after)
    layout = min(parts, key=lambda part: abs(part.finetune_sms - knobs.finetune_sms))
    count = keep_busy(state, predictor, job, layout)
    return StepPlan(layout, beside=count, job=job.job_id, reason="fixed partition"), charge(shares, job, count)
