"""Chunked training: the micro-batch is cut into chunks of tokens that ride along with decode steps.

A chunk goes through all layers at once, forward or backward, so each chunk reads all weights again; that is what it
pays for being short. The engine runs this policy over micro-batches of `chunk_tokens` tokens; a phase of such a
micro-batch (all forward tasklets, all that turn the loss into gradients, all backward tasklets with the optimizer)
follows a step as a whole or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.policy import tasklet_slices
from core.policy.allowance import spent
from core.policy.fit import fit, next_slack, start_ms
from core.policy.tasklet_slices import Memory, sliced
from core.policy.types import WHOLE, JobView, Predictor, StepPlan, StepState, TaskletKind


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


MEMORY = tasklet_slices.MEMORY


def plan(state: StepState, predictor: Predictor, memory: Memory, knobs: Knobs = KNOBS) -> tuple[StepPlan, Memory]:
    """As many whole phases as fit behind this step."""

    def behind(job: JobView, credit: float) -> tuple[StepPlan, float]:
        decode = predictor.decode_upper_ms(WHOLE, state.padded, state.kv_tokens, None, state.max_kv)
        budget = next_slack(state, start_ms(state, WHOLE) + decode) - decode
        count, end = 0, _phase_end(job.tasklets, 0)
        fitting, _ = fit(job, predictor, budget)
        while count < end <= fitting:
            count, end = end, _phase_end(job.tasklets, end)
        if not count and budget > 0 and (left := spent(credit, state)) is not None:
            credit, count = left, end
        reason = f"{budget:.1f} ms of slack for chunks of {knobs.chunk_tokens} tokens"
        return StepPlan(after=count, job=job.job_id, pause=not count, reason=reason), credit

    return sliced(state, predictor, memory, knobs, behind)


def _phase_end(kinds: tuple[TaskletKind, ...], start: int) -> int:
    """Where the phase that begins at `start` ends; the optimizer's tasklet belongs to the phase before it."""
    end = start
    while end < len(kinds) and kinds[end] == kinds[start]:
        end += 1
    while start < end < len(kinds) and kinds[end] == "optimizer":
        end += 1
    return end
