"""Time slices: as many next tasklets as fit in the slack behind the step, on the whole device (LLMStation's planner).

The slack of a step is its tightest target less what is still queued and the upper bound of the decode step. A tasklet
that is longer than the slack of every step would never run; it gets its turn from an allowance: a share of the decode
tokens, well under the 1 % that a p99 target leaves, may be late on purpose. Tokens of planned steps earn it and a step
that runs over spends its batch, so the late share never exceeds the allowance by more than one step.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from core.policy.fit import blocked, fit
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
    credit = min(memory.credit + knobs.allowance * state.batch, state.batch)
    if reason := blocked(state, predictor):
        return StepPlan(pause=True, reason=reason), Memory(credit, memory.shares)
    job, shares = next_job(state, memory.shares, knobs.quantum_tokens)
    if job is None:
        return StepPlan(pause=True, reason="no memory for the next tasklets"), Memory(credit, shares)
    if state.batch:
        count, late, reason = _slice(state, predictor, job, credit, knobs)
    else:
        count, late, reason = _idle(state, predictor, job, knobs), False, "nothing decodes"
    answer = StepPlan(after=count, job=job.job_id, pause=not count, reason=reason)
    return answer, Memory(credit - state.batch if late else credit, charge(shares, job, count))


def _slice(state: StepState, predictor: Predictor, job: JobView, credit: float, knobs: Knobs) -> tuple[int, bool, str]:
    """Tasklets behind this step, whether they make it late on purpose, and why."""
    busy = state.inflight_ms + predictor.decode_upper_ms(WHOLE, state.padded, state.kv_tokens, None, state.max_kv)
    if busy == inf:
        return 0, False, "no estimate of the decode step yet"
    budget = min(state.slack_ms) - busy if state.slack_ms else knobs.idle_ms - state.inflight_ms
    if budget <= 0:
        return 0, False, f"no slack: {busy + budget:.1f} ms, the step takes up to {busy:.1f}"
    count, _ = fit(job, predictor, budget)
    if count:
        return count, False, f"{budget:.1f} ms of slack"
    if credit >= state.batch and state.inflight_ms == 0 and job.tasklets:
        return 1, True, f"{budget:.1f} ms of slack, one longer {job.tasklets[0]} tasklet on the allowance"
    return 0, False, f"no tasklet fits in {budget:.1f} ms of slack"


def _idle(state: StepState, predictor: Predictor, job: JobView, knobs: Knobs) -> int:
    """Nothing decodes: a bounded run of tasklets, one at least once the queue is empty."""
    count, _ = fit(job, predictor, knobs.idle_ms - state.inflight_ms)
    return count if count or state.inflight_ms else min(1, len(job.tasklets))
