"""Whole micro-steps: a complete micro-batch, or nothing (FineInfer's deferred continuous batching).

Finetuning runs a micro-batch from its first forward to its last tasklet without a break, when no prefill waits and the
requests can be deferred for so long. The deferral bound is the slack behind the step, or `deferral_ms` when that is
less. A micro-batch longer than every deferral waits until nothing decodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from core.policy.fit import NO_MEMORY, blocked, fit, next_slack, start_ms
from core.policy.shares import NO_SHARES, Shares, charge, next_job
from core.policy.types import WHOLE, Predictor, StepPlan, StepState


@dataclass(frozen=True, slots=True)
class Knobs:
    """deferral_ms: the longest that running requests are deferred, if their slack is longer; quantum_tokens: finetune
    tokens of a turn of a tenant of weight 1."""

    deferral_ms: float = inf
    quantum_tokens: float = 4096.0


KNOBS = Knobs()
MEMORY: Shares = NO_SHARES


def plan(state: StepState, predictor: Predictor, memory: Shares, knobs: Knobs = KNOBS) -> tuple[StepPlan, Shares]:
    """All that is left of the job's micro-batch behind this step, if it fits, or at once when nothing decodes."""
    if reason := blocked(state, predictor):
        return StepPlan(pause=True, reason=reason), memory
    job, shares = next_job(state, memory, knobs.quantum_tokens)
    if job is None:
        return StepPlan(pause=True, reason=NO_MEMORY), shares
    count = len(job.tasklets)
    if "optimizer" in job.tasklets:
        count = job.tasklets.index("optimizer") + 1
    if state.batch:
        decode = predictor.decode_upper_ms(WHOLE, state.padded, state.kv_tokens, None, state.max_kv)
        budget = min(next_slack(state, start_ms(state, WHOLE) + decode) - decode, knobs.deferral_ms)
        fitting, _ = fit(job, predictor, budget)
        if fitting < count:
            reason = f"the micro-batch does not fit in {budget:.1f} ms"
            return StepPlan(job=job.job_id, pause=True, reason=reason), shares
    elif state.inflight_ms:
        return StepPlan(job=job.job_id, reason="a micro-batch runs"), shares
    return StepPlan(after=count, job=job.job_id, reason="a whole micro-batch"), charge(shares, job, count)
