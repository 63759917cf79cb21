"""Which decode steps to measure: the fewest that pin the two-stage fit down.

What the fit may get wrong is written as a covariance of relative errors over all sizes that could be measured: an error
of each coefficient that all partitions share, one of each partition, the same for φ, and what the model leaves over.
Measuring one size tells about all that are correlated with it. The plan takes the size that is known least, works out
what is then still unknown of the others, and goes on until every size is known to the tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from core.policy.types import WHOLE, Layout
from core.predictor.residual import likeness
from core.predictor.sizes import Array, Sizes, sizes_of

_COMMON, _OWN = 0.5, 0.15  # relative errors of stage 1's coefficients before any measurement
_PHI_COMMON, _PHI_OWN = 0.3, 0.08  # and of 1 + φ
_SPREAD, _NOISE = 0.04, 0.01  # of what the model leaves over, and of one measurement
_SHORTEST = 256  # tokens of the shortest request that is measured
_TYPICAL = 5.0, 0.012, 3e-5  # ms: constant, per request, per KV token, on the whole device


class Size(NamedTuple):
    """A decode step to measure: `batch` requests of `context` tokens each in `layout`, alone or beside tasklets."""

    layout: Layout
    batch: int
    context: int
    beside: bool


def measurable(
    layouts: Sequence[Layout], batches: Sequence[int], contexts: Sequence[int], max_kv_tokens: int
) -> list[Size]:
    """All sizes that could be measured: every batch and context as far as `max_kv_tokens` goes, alone and beside, in
    each layout; a confined one is the whole device when nothing is beside."""
    return [
        Size(layout, batch, context, beside)
        for layout in layouts
        for beside in (False, True)
        for batch in batches
        for context in contexts
        if batch * context <= max_kv_tokens and (layout.kind != "confined" if not beside else layout.kind != "whole")
    ]


def measuring_plan(sizes: Sequence[Size], sms: int, *, tolerance: float = 0.02, most: int = 160) -> list[Size]:
    """Those of `sizes` to measure, in the order in which to do it, so that what time allows is always the best part.

    tolerance: standard deviation of the relative error that is good enough; most: sizes at most.
    """
    unknown = _covariance(sizes_of([(s.layout, s.beside, s.batch, s.batch * s.context, s.context) for s in sizes], sms))
    plan: list[Size] = []
    while len(plan) < min(most, len(sizes)):
        at = int(np.argmax(np.diag(unknown)))
        if unknown[at, at] < tolerance**2:
            break
        plan.append(sizes[at])
        column = unknown[:, at].copy()
        unknown -= np.outer(column, column) / (column[at] + _NOISE**2)
    return plan


def batches_to_measure(
    captured: Sequence[int], max_context: int, max_kv_tokens: int, sms: int, *, most: int = 8
) -> list[tuple[int, int]]:
    """(requests, tokens of each) of the batches to decode when every layout is measured with each, the best first.

    The largest batch, the longest request and the most KV tokens are among the first, since nothing is promised beyond
    them; which others, and in which order, is what `measuring_plan` says of the whole device.
    """
    largest = max(captured)
    wanted = (1, largest / 8, largest / 3, largest)
    batches = sorted({min(size for size in captured if size >= least) for least in wanted})
    longest = min(max_context, max_kv_tokens)
    if longest < 1:
        return []
    shortest = min(_SHORTEST, longest)
    contexts = sorted({round(shortest * (longest / shortest) ** (n / 3)) for n in range(4)})
    sizes = measurable((WHOLE,), batches, contexts, max_kv_tokens)
    if not sizes:
        return []
    edges = [
        max(sizes, key=lambda size: (size.batch * size.context, size.batch)),
        max(sizes, key=lambda size: (size.batch, size.context)),
        max(sizes, key=lambda size: (size.context, size.batch)),
    ]
    plan = [*edges, *measuring_plan(sizes, sms, tolerance=0.0, most=len(sizes))]
    return [(size.batch, size.context) for size in dict.fromkeys(plan)][:most]


def _covariance(sizes: Sizes) -> Array:
    """Of the relative errors of all sizes before any is measured."""
    constant, per_request, per_token = _TYPICAL
    scale = sizes.decode_sms.max() / sizes.decode_sms
    terms = np.stack(
        [
            np.full(len(sizes), constant),
            per_request * scale * sizes.batch,
            per_request * scale * np.maximum(sizes.batch - 64, 0.0),
            per_token * scale * sizes.kv_tokens,
            10 * per_token * sizes.max_kv,
        ],
        axis=1,
    )
    terms /= terms.sum(axis=1, keepdims=True)
    alike = terms @ terms.T
    same_part = sizes.decode_sms[:, None] == sizes.decode_sms
    same_kind = sizes.beside[:, None] & sizes.beside & (sizes.kind[:, None] == sizes.kind)
    same_share = same_kind & (sizes.share[:, None] == sizes.share)
    covariance: Array = alike * (
        _COMMON**2 + _OWN**2 * same_part + _PHI_COMMON**2 * same_kind + _PHI_OWN**2 * same_share
    ) + _SPREAD**2 * likeness(sizes, sizes)
    return covariance
