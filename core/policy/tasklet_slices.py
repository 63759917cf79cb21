"""Time slices: as many next tasklets as fit in the slack behind the step, on the whole device (LLMStation's planner).

The slack behind a step is what its tightest target gives the next gap, less the upper bound of the next decode step. A
tasklet that is longer than that would never run; it gets its turn from an allowance (`core.policy.allowance`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Protocol

from core.policy.allowance import earned, spent
from core.policy.fit import NO_MEMORY, blocked, fit, idle, next_slack, start_ms
from core.policy.shares import NO_SHARES, Shares, charge, next_job
from core.policy.types import WHOLE, JobView, Predictor, StepPlan, StepState


@dataclass(frozen=True, slots=True)
class Knobs:
    """idle_ms: the longest run of tasklets launched at once when nothing decodes or no target applies, which is what
    an arriving prompt may have to wait; allowance: share of the decode tokens that may be late so that a tasklet longer
    than the slack makes progress (0: it waits until nothing decodes); quantum_tokens: finetune tokens of a turn of a
    tenant of weight 1."""

    idle_ms: float = 20.0
    allowance: float = 0.004
    quantum_tokens: float = 4096.0


KNOBS = Knobs()


@dataclass(frozen=True, slots=True)
class Memory:
    """credit: decode tokens that may still be late on purpose; shares: the tenants' accounts."""

    credit: float = 0.0
    shares: Shares = NO_SHARES


MEMORY = Memory()


def plan(state: StepState, predictor: Predictor, memory: Memory, knobs: Knobs = KNOBS) -> tuple[StepPlan, Memory]:
    """The whole device's time slice behind this step; a pause with its reason when there is none to give."""

    def behind(job: JobView, credit: float) -> tuple[StepPlan, float]:
        return time_slice(state, predictor, job, credit, knobs.idle_ms)

    return sliced(state, predictor, memory, knobs, behind)


class Slicing(Protocol):
    """Knobs of a policy that works between steps."""

    @property
    def allowance(self) -> float: ...

    @property
    def idle_ms(self) -> float: ...

    @property
    def quantum_tokens(self) -> float: ...


def sliced(
    state: StepState,
    predictor: Predictor,
    memory: Memory,
    knobs: Slicing,
    behind: Callable[[JobView, float], tuple[StepPlan, float]],
) -> tuple[StepPlan, Memory]:
    """A policy that works between steps only: `behind` plans what follows this one for a job and a credit."""
    credit = earned(memory.credit, state, knobs.allowance)
    if reason := blocked(state, predictor):
        return StepPlan(pause=True, reason=reason), Memory(credit, memory.shares)
    job, shares = next_job(state, memory.shares, knobs.quantum_tokens)
    if job is None:
        return StepPlan(pause=True, reason=NO_MEMORY), Memory(credit, shares)
    if state.batch:
        answer, credit = behind(job, credit)
    else:
        answer = idle(job, predictor, state, knobs.idle_ms)
    return answer, Memory(credit, charge(shares, job, answer.after))


def time_slice(
    state: StepState,
    predictor: Predictor,
    job: JobView,
    credit: float,
    untargeted_ms: float,
    squeeze: float = 1.0,
    next_ms: float = 0.0,
) -> tuple[StepPlan, float]:
    """Tasklets behind this step and the credit left. untargeted_ms: the slice when no target applies; squeeze: part of
    the slack that may be used; next_ms: what the next step takes, if that is more than this one."""
    decode = predictor.decode_upper_ms(WHOLE, state.padded, state.kv_tokens, None, state.max_kv)
    if decode == inf:
        return StepPlan(job=job.job_id, pause=True, reason="no prediction for a step of this size"), credit
    slack = next_slack(state, start_ms(state, WHOLE) + decode)
    budget = squeeze * (untargeted_ms if slack == inf else slack - max(decode, next_ms))
    if next_ms > decode:
        count, _ = fit(job, predictor, budget)
        return StepPlan(after=count, job=job.job_id, reason="makes room for another layout"), credit
    if budget <= 0:
        reason = f"no slack: {slack:.1f} ms, a step takes up to {decode:.1f} ms"
        return StepPlan(job=job.job_id, pause=True, reason=reason), credit
    count, _ = fit(job, predictor, budget)
    if count or not job.tasklets:
        return StepPlan(after=count, job=job.job_id, reason=f"{budget:.1f} ms of slack"), credit
    left = spent(credit, state)
    if left is None:
        reason = f"no tasklet fits in {budget:.1f} ms of slack"
        return StepPlan(job=job.job_id, pause=True, reason=reason), credit
    reason = f"{budget:.1f} ms of slack, one longer {job.tasklets[0]} tasklet on the allowance"
    return StepPlan(after=1, job=job.job_id, reason=reason), left
