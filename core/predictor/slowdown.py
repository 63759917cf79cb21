"""How much longer a tasklet takes on the finetune part of a layout than on the whole device, next to decode or not."""

from __future__ import annotations

from statistics import fmean

import numpy as np

from core.policy.types import WHOLE, Layout, TaskletKind
from core.predictor.profile import TaskletPoint
from core.predictor.residual import Residual
from core.predictor.sizes import Array, Sizes, sizes_of

_SPREAD, _NOISE = 0.1, 0.01  # of the logarithmic residuals, and of a measurement itself


class Slowdown:
    """Per kind of layout a power of the finetune part's share of the SMs, and a Gaussian process over what that leaves.

    whole_ms: ms of each kind of tasklet alone on the whole device, the unit of all the others. All kinds are taken to
    slow down as those that multiply matrices do: the optimizer, a fraction of a ms, is bound by memory and would tell
    nothing of them. alone: layout → factor when nothing decodes.
    """

    def __init__(self, points: tuple[TaskletPoint, ...], sms: int) -> None:
        """Raises ValueError when a kind was not measured on the whole device."""
        self.whole_ms: dict[TaskletKind, float] = {
            point.kind: point.ms for point in points if point.layout == WHOLE and not point.batch
        }
        unknown = {point.kind for point in points} - set(self.whole_ms)
        if unknown:
            raise ValueError(f"tasklets {', '.join(sorted(unknown))} were not measured alone on the whole device")
        parted = [point for point in points if point.layout != WHOLE]
        parted = [point for point in parted if point.kind != "optimizer"] or parted
        alone: dict[Layout, list[float]] = {}
        for point in parted:
            if not point.batch:
                alone.setdefault(point.layout, []).append(point.ms / self.whole_ms[point.kind])
        self.alone = {layout: fmean(factors) for layout, factors in alone.items()}
        beside = [point for point in parted if point.batch]
        self._lines: dict[int, Array] = {}
        self._residual: Residual | None = None
        if not beside:
            return
        sizes = sizes_of([(p.layout, True, p.batch, p.kv_tokens, p.kv_tokens / p.batch) for p in beside], sms)
        factors = np.log([point.ms / self.whole_ms[point.kind] for point in beside])
        for kind in np.unique(sizes.kind):
            chosen = sizes.kind == kind
            columns = np.stack([np.ones(chosen.sum()), np.log(sizes.share[chosen])], axis=1)
            self._lines[int(kind)] = np.linalg.lstsq(columns, factors[chosen], rcond=None)[0]
        self._residual = Residual(sizes, factors - self._line(sizes), _SPREAD, _NOISE)

    def factors(self, sizes: Sizes) -> Array:
        """Factor next to each decode step; infinite for a kind of layout that was not measured."""
        if self._residual is None:
            return np.full(len(sizes), np.inf)
        factors: Array = np.exp(self._line(sizes) + self._residual.at(sizes))
        return factors

    def _line(self, sizes: Sizes) -> Array:
        line = np.full(len(sizes), np.inf)
        for kind, (level, power) in self._lines.items():
            chosen = sizes.kind == kind
            line[chosen] = level + power * np.log(sizes.share[chosen])
        return line
