"""Moving averages with a rolling bound: the predictor of a device that is only sliced in time and has no profile."""

from __future__ import annotations

from bisect import bisect_left, insort
from math import inf

from core.policy.types import Layout, TaskletKind
from core.predictor.stale import MissWatch
from core.predictor.window import RollingQuantile

_UNSEEN = 2.0  # a kind of tasklet not seen yet is taken to last this often the slowest that was
_FEW = 1.25  # the bound of a cell with fewer values than a quantile needs: at least this often its average
_TASKLET_MISS = (
    0.1  # share of tasklets that may outlast theirs: several run in one gap, and seldom all of them are late
)
_COLD = 3  # the first ones pay for memory and kernels: the shortest of them is where the average starts
_JUMP = 2.0  # one measurement counts at most as this often (or this part of) the average: a hiccup is not a trend


class _Cell:
    """Moving average of one duration, and the rolling quantile of measured ÷ average."""

    __slots__ = ("_rate", "mean", "ratios", "seen", "upper")

    def __init__(self, rate: float, window: int, miss: float) -> None:
        self._rate = rate
        self.mean = 0.0
        self.upper = inf
        self.seen = 0
        self.ratios = RollingQuantile(window, miss)

    def observe(self, ms: float, pool: RollingQuantile) -> bool:
        """Take in one duration; `pool` are the ratios of all cells of its layout, which bound a cell that has few."""
        missed = self.seen >= _COLD and ms > self.upper
        self.seen += 1
        if self.seen <= _COLD:
            self.mean = min(ms, self.mean or ms)
        else:
            ratio = ms / self.mean
            self.ratios.push(ratio)
            pool.push(ratio)
            step = min(max(ratio, 1 / _JUMP), _JUMP) - 1
            self.mean *= 1 + step * max(self._rate, 1 / self.seen)
        quantile = self.ratios.value or 1.0
        if len(self.ratios) < self.ratios.enough:
            quantile = max(quantile, pool.value or 1.0)
            if len(pool) < pool.enough:
                quantile = max(quantile, _FEW)
        self.upper = self.mean * max(quantile, 1.0)
        return missed


class MovingPredictor:
    """Step time per (layout, padded batch) and tasklet time per (layout, kind), learnt only from what was observed.

    A padded batch not seen yet is answered by the next larger one that was, else by the largest scaled with the batch;
    with nothing seen the answer is ``inf``, so that nothing is planned before the first step was measured. KV tokens
    move the average slowly and are not a feature here. Both calls cost a few microseconds.
    """

    def __init__(self, rate: float = 0.05, window: int = 400, miss: float = 0.01) -> None:
        """rate: weight of a new measurement; window: measurements that the bound looks back on; miss: share of steps
        that may outlast the bound."""
        self._new = (rate, window, miss)
        self._steps: dict[tuple[Layout, int], _Cell] = {}
        self._sizes: dict[Layout, list[int]] = {}
        self._tasklets: dict[tuple[Layout, TaskletKind], _Cell] = {}
        self._pools: dict[Layout, RollingQuantile] = {}
        self._tasklet_pools: dict[Layout, RollingQuantile] = {}
        self._watch = MissWatch()

    @property
    def stale(self) -> str:
        return self._watch.reason

    def decode_ms(
        self, layout: Layout, padded: int, kv_tokens: int, max_kv: int = 0, beside: TaskletKind | None = None
    ) -> float:
        """Average of the steps of this size alone; nothing is known of a step beside a tasklet."""
        cell, scale = self._near(layout, padded)
        return cell.mean * scale if cell else inf

    def decode_upper_ms(
        self, layout: Layout, padded: int, kv_tokens: int, beside: TaskletKind | None, max_kv: int = 0
    ) -> float:
        """Bound of a step of this size; nothing is known of a step beside a tasklet."""
        if beside is not None:
            return inf
        cell, scale = self._near(layout, padded)
        return cell.upper * scale if cell else inf

    def tasklet_ms(self, layout: Layout, kind: TaskletKind, padded: int = 0, kv_tokens: int = 0) -> float:
        """Bound of one tasklet of the kind, ``inf`` as long as none of any kind was seen in this layout."""
        cell = self._tasklets.get((layout, kind))
        if cell is not None:
            return cell.upper
        seen = [c.upper for (at, _), c in self._tasklets.items() if at == layout]
        return _UNSEEN * max(seen) if seen else inf

    def tasklet_mean_ms(self, layout: Layout, kind: TaskletKind, padded: int = 0, kv_tokens: int = 0) -> float:
        """Average of the tasklets of the kind, their bound as long as none was seen."""
        cell = self._tasklets.get((layout, kind))
        return cell.mean if cell is not None else self.tasklet_ms(layout, kind)

    def observe_step(
        self,
        layout: Layout,
        padded: int,
        kv_tokens: int,
        ms: float,
        beside: TaskletKind | None = None,
        max_kv: int = 0,
    ) -> bool:
        """Learn one step; True when it outlasted its bound. Steps beside a tasklet are not learnt from."""
        if beside is not None:
            return False
        cell = self._steps.get((layout, padded))
        if cell is None:
            cell = self._steps[layout, padded] = _Cell(*self._new)
            insort(self._sizes.setdefault(layout, []), padded)
        missed = cell.observe(ms, self._pool(self._pools, layout, self._new[2]))
        self._watch.see(missed)
        return missed

    def observe_tasklet(
        self, layout: Layout, kind: TaskletKind, ms: float, padded: int = 0, kv_tokens: int = 0
    ) -> None:
        """Learn one tasklet."""
        cell = self._tasklets.get((layout, kind))
        if cell is None:
            rate, window, _ = self._new
            cell = self._tasklets[layout, kind] = _Cell(rate, window, _TASKLET_MISS)
        cell.observe(ms, self._pool(self._tasklet_pools, layout, _TASKLET_MISS))

    def forget_tasklets(self) -> None:
        """Another job with tasklets of another size runs from now on."""
        self._tasklets.clear()
        self._tasklet_pools.clear()

    def learnt(self, layout: Layout) -> tuple[list[tuple[int, float, float]], dict[TaskletKind, tuple[float, float]]]:
        """What is known of a layout: (padded batch, mean ms, bound ms) of its steps, (mean ms, bound ms) of its
        tasklets by kind."""
        steps = [(size, cell.mean, cell.upper) for (at, size), cell in sorted(self._steps.items()) if at == layout]
        tasklets = {kind: (cell.mean, cell.upper) for (at, kind), cell in self._tasklets.items() if at == layout}
        return steps, tasklets

    def _pool(self, pools: dict[Layout, RollingQuantile], layout: Layout, miss: float) -> RollingQuantile:
        pool = pools.get(layout)
        if pool is None:
            pool = pools[layout] = RollingQuantile(self._new[1], miss)
        return pool

    def _near(self, layout: Layout, padded: int) -> tuple[_Cell | None, float]:
        cell = self._steps.get((layout, padded))
        if cell is not None:
            return cell, 1.0
        sizes = self._sizes.get(layout)
        if not sizes:
            return None, 1.0
        at = bisect_left(sizes, padded)
        if at < len(sizes):
            return self._steps[layout, sizes[at]], 1.0
        return self._steps[layout, sizes[-1]], padded / sizes[-1]
