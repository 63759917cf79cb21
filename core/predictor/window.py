"""A rolling upper quantile."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from math import ceil


class RollingQuantile:
    """Conformal upper quantile of the last `size` values: the smallest of them that a new exchangeable value exceeds
    with probability at most `miss`. Until `enough` values are there none of them promises that; `value` is then their
    largest, and None when there is none. Pushing costs about two microseconds."""

    __slots__ = ("_order", "_size", "_sorted", "enough", "miss", "value")

    def __init__(self, size: int, miss: float) -> None:
        self._size = size
        self._order: deque[float] = deque()
        self._sorted: list[float] = []
        self.miss = miss
        self.enough = ceil(1 / miss) - 1
        self.value: float | None = None

    def __len__(self) -> int:
        return len(self._sorted)

    def push(self, x: float) -> None:
        """Take in `x`, drop the oldest when full."""
        values = self._sorted
        if len(values) == self._size:
            del values[bisect_left(values, self._order.popleft())]
        self._order.append(x)
        insort(values, x)
        self.value = self._quantile()

    def forget_above(self, limit: float) -> None:
        """Forget the larger half of the values above `limit`."""
        values = self._sorted
        above = len(values) - bisect_right(values, limit)
        if not above:
            return
        bound = values[-((above + 1) // 2)]
        del values[bisect_left(values, bound) :]
        self._order = deque([x for x in self._order if x < bound])
        self.value = self._quantile() if values else None

    def _quantile(self) -> float:
        n = len(self._sorted)
        return self._sorted[min(ceil((n + 1) * (1 - self.miss)), n) - 1]
