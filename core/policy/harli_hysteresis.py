"""The one-notch rule of the prototype that is public: a notch of the SMs back to decode when its step is over a high
mark, one to finetuning when it is under a low mark. The prototype has 40 and 30 ms for a target of 40 ms."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from core.policy.fit import NO_MEMORY, blocked, idle, keep_busy, retreat, splits
from core.policy.shares import NO_SHARES, Shares, charge, next_job
from core.policy.types import WHOLE, JobView, Predictor, StepPlan, StepState


@dataclass(frozen=True, slots=True)
class Knobs:
    """high, low: the marks as shares of the slack; idle_ms: the longest run of tasklets at once when nothing decodes;
    quantum_tokens: finetune tokens of a turn of a tenant of weight 1."""

    high: float = 1.0
    low: float = 0.75
    idle_ms: float = 20.0
    quantum_tokens: float = 4096.0


KNOBS = Knobs()


@dataclass(frozen=True, slots=True)
class Memory:
    """notch: finetune parts from the smallest on, 0 being none; shares: the tenants' accounts."""

    notch: int = 0
    shares: Shares = NO_SHARES


MEMORY = Memory()


def plan(state: StepState, predictor: Predictor, memory: Memory, knobs: Knobs = KNOBS) -> tuple[StepPlan, Memory]:
    """The present notch, or the one next to it."""
    if reason := blocked(state, predictor):
        return StepPlan(retreat(state, predictor), pause=True, reason=reason), replace(memory, notch=0)
    job, shares = next_job(state, memory.shares, knobs.quantum_tokens)
    if job is None:
        return StepPlan(retreat(state, predictor), pause=True, reason=NO_MEMORY), Memory(0, shares)
    if not state.batch:
        answer = idle(job, predictor, state, knobs.idle_ms)
        return answer, Memory(memory.notch, charge(shares, job, answer.after))
    notch = _notch(state, predictor, job, memory.notch, knobs)
    if not notch:
        return StepPlan(
            retreat(state, predictor), job=job.job_id, pause=True, reason="step over the high mark"
        ), Memory(0, shares)
    layout = splits(state.layouts)[-notch]
    count = keep_busy(state, predictor, job, layout)
    answer = StepPlan(layout, beside=count, job=job.job_id, reason=f"notch {notch}")
    return answer, Memory(notch, charge(shares, job, count))


def _notch(state: StepState, predictor: Predictor, job: JobView, notch: int, knobs: Knobs) -> int:
    parts = splits(state.layouts)
    notch = min(notch, len(parts))
    slack = min(state.slack_ms, default=inf)
    step = _step_ms(state, predictor, job, notch)
    if step > knobs.high * slack:
        return max(0, notch - 1)
    up = notch < len(parts) and step < knobs.low * slack and _step_ms(state, predictor, job, notch + 1) < inf
    return notch + up


def _step_ms(state: StepState, predictor: Predictor, job: JobView, notch: int) -> float:
    layout, kind = (splits(state.layouts)[-notch], job.tasklets[0]) if notch and job.tasklets else (WHOLE, None)
    return predictor.decode_upper_ms(layout, state.padded, state.kv_tokens, kind, state.max_kv)
