"""How long steps may be so that the batch does not outgrow the engine.

Requests come at their own rate whatever the steps take, so steps that take twice as long have twice the requests in
their batch and twice their KV tokens in memory (Little's law). Where KV cache and finetuning share memory that is felt
as finetuning that has to give its memory back; where places in the batch are limited, as requests that wait.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from core.policy.types import JobView, StepState

_ROOM = 1.15  # being short of memory now and then costs less than never being so
_LIFE = 200  # steps that a batch takes to settle when requests come or steps get longer: about an answer's tokens
_GAP_REACH, _GROWTH_REACH = 1 / _LIFE, 1 / 64  # weights of a step in the running means


class Crowding(NamedTuple):
    """kv_tokens: of the last step; growth: running mean of what a step adds to them; gap_ms: running mean of the gap,
    over as many steps as the batch takes to follow it; part: what of the extra time may be used while requests wait."""

    kv_tokens: int = 0
    growth: float = 0.0
    gap_ms: float = 0.0
    part: float = 1.0


CALM = Crowding()


def after_step(before: Crowding, state: StepState, gap_ms: float, yielding: float) -> Crowding:
    """With one more step, which takes `gap_ms`. Each step with waiting requests gives up `yielding` of the extra time,
    forty without any get that much back."""
    part = before.part
    if state.waiting:
        part *= 1 - yielding
    elif part < 1:
        part = min(1.0, part + yielding / 40)
    if not state.kv_tokens_per_page or gap_ms == inf:
        return before if part == before.part else Crowding(part=part)
    kv_tokens = state.kv_tokens
    if not before.gap_ms:
        return Crowding(kv_tokens, 0.0, gap_ms, part)
    growth = before.growth + _GROWTH_REACH * (kv_tokens - before.kv_tokens - before.growth)
    return Crowding(kv_tokens, growth, before.gap_ms + _GAP_REACH * (gap_ms - before.gap_ms), part)


def longest_gap(crowding: Crowding, state: StepState, job: JobView) -> float:
    """ms between two steps at which the KV cache, once it has settled, leaves `job` its memory most of the time;
    ``inf`` when the two do not share it."""
    if not state.kv_tokens_per_page or not crowding.gap_ms:
        return inf
    room = state.kv_tokens + (state.free_pages - job.pages) * state.kv_tokens_per_page
    return _ROOM * room * crowding.gap_ms / (state.kv_tokens + _LIFE * max(0.0, crowding.growth))
