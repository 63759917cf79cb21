"""Reading values off the frontier between its points."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from core.api.schemas import FrontierPoint


def at(points: Sequence[FrontierPoint], target_ms: float) -> FrontierPoint:
    """The frontier at a target: linear between its neighbours, the nearest end outside of them; the layout is that of
    the nearer one. `points` are in order of their targets, at least one."""
    targets = [point.target_ms for point in points]
    index = bisect_left(targets, target_ms)
    if index == 0 or index == len(points):
        return points[min(index, len(points) - 1)].model_copy(update={"target_ms": target_ms})
    low, high = points[index - 1], points[index]
    share = (target_ms - low.target_ms) / (high.target_ms - low.target_ms)
    names = ("finetune_tokens_s", "exclusive_share", "itl_p50_ms", "itl_p99_ms", "attainment")
    ends = {name: (getattr(low, name), getattr(high, name)) for name in names}
    between = {
        name: None if from_ is None or to is None else from_ + share * (to - from_)
        for name, (from_, to) in ends.items()
    }
    return FrontierPoint(target_ms=target_ms, layout=(low if share < 0.5 else high).layout, **between)
