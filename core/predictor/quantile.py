"""The alternative to the two-stage fit: trees that learn the upper quantile of a step itself.

Gradient boosting with a quantile loss (scikit-learn, which Harli does not otherwise need) over decode SMs, finetuning's
share of the SMs, batch and KV tokens, never falling with the last two. It assumes no form, so it needs more
measurements, learns only when it is fitted again, and knows nothing beyond the largest size measured. `refit` takes up
to seconds and belongs in a thread; what it gives is a table, as cheap to look up as the two-stage predictor's.
"""

from __future__ import annotations

from collections import deque
from math import inf, log
from typing import Any

import numpy as np

from core.policy.types import WHOLE, Layout, TaskletKind
from core.predictor.profile import Point, Profile
from core.predictor.sizes import Array, Sizes, sizes_of
from core.predictor.stale import MissWatch
from core.predictor.table import StepTable, grid_of
from core.predictor.two_stage import TwoStagePredictor

_PER_POINT = 20  # values that a measured (median, p99) stands for
_KEPT = 20_000  # newest steps that a fit sees
_LEAVES, _ROUNDS, _RATE, _LEAST = 16, 300, 0.3, 20

Step = tuple[Layout, bool, int, int, float]


class QuantilePredictor:
    """Bounds of steps by quantile regression; tasklets and the median step as in `TwoStagePredictor`."""

    def __init__(self, profile: Profile, miss: float = 0.01) -> None:
        """miss: share of steps that may outlast the bound."""
        points = profile.points
        self._sms = profile.machine.sms
        self._miss = miss
        self._grid = grid_of(profile)
        self._two_stage = TwoStagePredictor(profile, miss)
        self._known = [step for point in points for step in _steps(point)]
        self._seen: deque[Step] = deque(maxlen=_KEPT)
        self._watch = MissWatch()
        self._tables: dict[tuple[Layout, bool], StepTable] = {}
        self.refit()

    @property
    def stale(self) -> str:
        return self._watch.reason

    @property
    def layouts(self) -> tuple[Layout, ...]:
        return self._two_stage.layouts

    def refit(self) -> None:
        """Fit again to the profile and the newest steps."""
        from sklearn.ensemble import HistGradientBoostingRegressor  # type: ignore[import-not-found,import-untyped,unused-ignore]
        from threadpoolctl import threadpool_limits  # type: ignore[import-not-found,import-untyped,unused-ignore]

        steps = [*self._known, *self._seen]
        model = HistGradientBoostingRegressor(
            loss="quantile", quantile=1 - self._miss, max_iter=_ROUNDS, learning_rate=_RATE, max_leaf_nodes=_LEAVES,
            min_samples_leaf=_LEAST, monotonic_cst=[0, 0, 0, 1, 1],
        )  # fmt: skip
        sizes = sizes_of([(layout, beside, b, kv, kv / b) for layout, beside, b, kv, _ in steps], self._sms)
        with threadpool_limits(1):  # an engine runs beside it
            model.fit(_features(sizes), [log(ms) for *_, ms in steps])
        for layout, beside in {(layout, beside) for layout, beside, *_ in self._known}:
            by_kv = self._predict(model, self._grid.by_kv_tokens(layout, beside))
            by_queue = self._predict(model, self._grid.by_queue(layout, beside))
            self._tables[layout, beside] = StepTable(self._grid, layout, by_kv, by_queue)

    def decode_ms(
        self, layout: Layout, padded: int, kv_tokens: int, max_kv: int = 0, beside: TaskletKind | None = None
    ) -> float:
        """As `TwoStagePredictor.decode_ms`."""
        return self._two_stage.decode_ms(layout, padded, kv_tokens, max_kv, beside)

    def decode_upper_ms(
        self, layout: Layout, padded: int, kv_tokens: int, beside: TaskletKind | None, max_kv: int = 0
    ) -> float:
        """The learnt quantile; ``inf`` outside the profile's sizes and for a layout that it has not."""
        where = WHOLE if beside is None and layout.kind == "confined" else layout
        table = self._tables.get((where, beside is not None))
        return table.ms(padded, kv_tokens, max_kv) if table is not None else inf

    def tasklet_ms(self, layout: Layout, kind: TaskletKind, padded: int = 0, kv_tokens: int = 0) -> float:
        """As `TwoStagePredictor.tasklet_ms`."""
        return self._two_stage.tasklet_ms(layout, kind, padded, kv_tokens)

    def tasklet_mean_ms(self, layout: Layout, kind: TaskletKind, padded: int = 0, kv_tokens: int = 0) -> float:
        """As `TwoStagePredictor.tasklet_mean_ms`."""
        return self._two_stage.tasklet_mean_ms(layout, kind, padded, kv_tokens)

    def observe_step(
        self,
        layout: Layout,
        padded: int,
        kv_tokens: int,
        ms: float,
        beside: TaskletKind | None = None,
        max_kv: int = 0,
    ) -> bool:
        """Keep a step for the next fit; True when it outlasted its bound."""
        missed = ms > self.decode_upper_ms(layout, padded, kv_tokens, beside, max_kv)
        where = WHOLE if beside is None and layout.kind == "confined" else layout
        self._seen.append((where, beside is not None, padded, max(kv_tokens, padded), ms))
        self._watch.see(missed)
        return missed

    def observe_tasklet(
        self, layout: Layout, kind: TaskletKind, ms: float, padded: int = 0, kv_tokens: int = 0
    ) -> None:
        """As `TwoStagePredictor.observe_tasklet`."""
        self._two_stage.observe_tasklet(layout, kind, ms, padded, kv_tokens)

    @staticmethod
    def _predict(model: Any, sizes: Sizes) -> Array:
        predicted: Array = np.exp(model.predict(_features(sizes)))
        return predicted


def _features(sizes: Sizes) -> Array:
    return np.stack(
        [
            sizes.decode_sms,
            sizes.share * sizes.beside,
            sizes.kind * sizes.beside,
            np.log2(sizes.batch),
            np.log2(sizes.kv_tokens),
        ],
        axis=1,
    )


def _steps(point: Point) -> list[Step]:
    """Steps that have the point's median and p99: below the median all alike, above it an exponential tail."""
    chances = (np.arange(_PER_POINT) + 0.5) / _PER_POINT
    above = np.maximum(0.0, np.log(0.5 / (1 - chances))) / log(50)
    values = point.ms + (point.p99_ms - point.ms) * above
    return [(point.layout, point.beside is not None, point.batch, point.kv_tokens, float(ms)) for ms in values]
