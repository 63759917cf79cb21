"""What longer steps cost where requests crowd.

Requests come at their own rate whatever the steps take, so steps that take twice as long have twice the requests in
their batch and twice their KV tokens in memory (Little's law). Where KV cache and finetuning share memory, steps so
long that the batch outgrows what finetuning leaves it are paid with time in which finetuning has to stand aside. Where
places in the batch are limited that is felt as requests that wait.

A tasklet beside a step lengthens it by less than it takes, one behind it by all of it. So where memory is what limits
finetuning, what runs behind steps comes last.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from core.policy.types import JobView, StepState

_REACH = 1 / 200  # weight of a step in the running means: a batch takes about an answer's tokens to follow its steps
_ROOM = 1.3  # being short of memory now and then costs less than never being so
_LEAST = 0.01  # of a step: differences below that say nothing


class Crowding(NamedTuple):
    """kv_tokens, gap_ms: running means over as many steps as the batch takes to follow them; part: what of the extra
    time may be used while requests wait."""

    kv_tokens: float = 0.0
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
        return before if part == before.part else before._replace(part=part)
    if not before.gap_ms:
        return Crowding(state.kv_tokens, gap_ms, part)
    kv_tokens = before.kv_tokens + _REACH * (state.kv_tokens - before.kv_tokens)
    return Crowding(kv_tokens, before.gap_ms + _REACH * (gap_ms - before.gap_ms), part)


def roomy_gap(crowding: Crowding, state: StepState, job: JobView) -> float:
    """ms between two steps up to which the KV cache, once it has followed them, leaves `job` its memory most of the
    time; ``inf`` when the two do not share it."""
    if not state.kv_tokens_per_page or not crowding.kv_tokens:
        return inf
    room = state.kv_tokens + (state.free_pages - job.pages) * state.kv_tokens_per_page
    return max(0.0, _ROOM * room * crowding.gap_ms / max(crowding.kv_tokens, state.kv_tokens))


def frugal_gap(roomy_ms: float, slack_ms: float, frugal: float) -> float:
    """What of the roomy gap tasklets behind a step may fill: the share `frugal` of one that is as long as the target's,
    more of a longer one in proportion."""
    if roomy_ms == inf or slack_ms <= 0:
        return roomy_ms
    return roomy_ms * min(1.0, frugal * roomy_ms / slack_ms)


def share_with_memory(gap_ms: float, roomy_ms: float, alone_ms: float) -> float:
    """Share of the time in which finetuning has its memory when steps take `gap_ms` with it and `alone_ms` without: so
    much that their mean is `roomy_ms`."""
    if gap_ms <= roomy_ms:
        return 1.0
    least = _LEAST * gap_ms
    return min(1.0, max(roomy_ms - alone_ms, least) / max(gap_ms - alone_ms, least))
