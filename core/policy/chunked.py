"""Chunked training: the micro-batch is cut into chunks of tokens that ride along with decode steps.

A chunk goes through all layers at once, forward or backward, so each chunk reads all weights again; that is what it
pays for being short. The engine runs this policy over micro-batches of `chunk_tokens` tokens; a phase of such a
micro-batch (all forward tasklets, all that turn the loss into gradients, all backward tasklets with the optimizer)
follows a step as a whole or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.policy.allowance import earned, spent
from core.policy.fit import NO_MEMORY, blocked, fit, idle, next_slack, start_ms
from core.policy.shares import NO_SHARES, Shares, charge, next_job
from core.policy.types import WHOLE, Predictor, StepPlan, StepState, TaskletKind


@dataclass(frozen=True, slots=True)
class Knobs:
    """chunk_tokens: tokens of a micro-batch, which the engine cuts it to; allowance: as of `tasklet_slices`;
    idle_ms: the longest run of tasklets at once when nothing decodes; quantum_tokens: finetune tokens of a turn of a
    tenant of weight 1."""

    chunk_tokens: int = 128
    allowance: float = 0.004
    idle_ms: float = 20.0
    quantum_tokens: float = 4096.0


KNOBS = Knobs()


@dataclass(frozen=True, slots=True)
class Memory:
    """credit: decode tokens that may still be late on purpose; shares: the tenants' accounts."""

    credit: float = 0.0
    shares: Shares = NO_SHARES


MEMORY = Memory()


def plan(state: StepState, predictor: Predictor, memory: Memory, knobs: Knobs = KNOBS) -> tuple[StepPlan, Memory]:
    """As many whole phases as fit behind this step."""
    credit = earned(memory.credit, state, knobs.allowance)
    if reason := blocked(state, predictor):
        return StepPlan(pause=True, reason=reason), Memory(credit, memory.shares)
    job, shares = next_job(state, memory.shares, knobs.quantum_tokens)
    if job is None:
        return StepPlan(pause=True, reason=NO_MEMORY), Memory(credit, shares)
    if not state.batch:
        answer = idle(job, predictor, state, knobs.idle_ms)
        return answer, Memory(credit, charge(shares, job, answer.after))
    decode = predictor.decode_upper_ms(WHOLE, state.padded, state.kv_tokens, None, state.max_kv)
    budget = next_slack(state, start_ms(state, WHOLE) + decode) - decode
    count, end = 0, _phase_end(job.tasklets, 0)
    fitting, _ = fit(job, predictor, budget)
    while count < end <= fitting:
        count, end = end, _phase_end(job.tasklets, end)
    if not count and budget > 0 and (left := spent(credit, state)) is not None:
        credit, count = left, end
    reason = f"{budget:.1f} ms of slack for chunks of {knobs.chunk_tokens} tokens"
    answer = StepPlan(after=count, job=job.job_id, pause=not count, reason=reason)
    return answer, Memory(credit, charge(shares, job, count))


def _phase_end(kinds: tuple[TaskletKind, ...], start: int) -> int:
    """Where the phase that begins at `start` ends; the optimizer's tasklet belongs to the phase before it."""
    end = start
    while end < len(kinds) and kinds[end] == kinds[start]:
        end += 1
    while start < end < len(kinds) and kinds[end] == "optimizer":
        end += 1
    return end
