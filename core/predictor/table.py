"""A fitted model written out over captured batch sizes and KV tokens, so that looking one up takes well under a
microsecond."""

from __future__ import annotations

from bisect import bisect_left
from math import inf, sqrt

import numpy as np

from core.policy.types import Layout
from core.predictor.sizes import Array, Sizes, sizes_of

STEPS = 24  # KV tokens are tabulated at their maximum times (n / STEPS)²


class Grid:
    """The sizes that tables cover: captured batches, KV tokens up to `max_kv_tokens`, requests up to `max_kv` tokens.

    rows: batch → row, a batch that was not captured having the row of the next larger one.
    """

    def __init__(self, captured: tuple[int, ...], max_kv_tokens: int, max_kv: int) -> None:
        self.batches = tuple(sorted(captured))
        self.rows = [bisect_left(self.batches, batch) for batch in range(self.batches[-1] + 1)]
        self.max_kv_tokens = max_kv_tokens
        self.max_kv = max_kv
        self.scale = STEPS / sqrt(max_kv_tokens)

    def sizes(self, layout: Layout, beside: bool, sms: int) -> Sizes:
        """Every (batch, KV tokens) of the grid, batches first. No request is long: with the longest request at the
        mean, a smaller batch would have longer ones, and a table that rises with the batch would be far too high."""
        kv = self.max_kv_tokens * (np.arange(STEPS + 1) / STEPS) ** 2
        return sizes_of(
            [(layout, beside, batch, max(tokens, batch), 0.0) for batch in self.batches for tokens in kv],
            sms,
        )


def rising(grid: Grid, values: Array) -> Array:
    """`values` at `Grid.sizes`, raised where they fell although batch or KV tokens rose."""
    table = values.reshape(len(grid.batches), STEPS + 1)
    raised: Array = np.maximum.accumulate(np.maximum.accumulate(table, axis=0), axis=1)
    return raised.ravel()


class StepTable:
    """A duration in ms of, or next to, a decode step, over the grid's sizes."""

    __slots__ = ("_base", "_grid", "_per_token", "_rows")

    def __init__(self, grid: Grid, values: Array, base: Array | None = None, per_token: Array | None = None) -> None:
        """values: ms at `Grid.sizes`; base, per_token: there too, the ms that a step takes at least for its longest
        request, ``base + per_token · max_kv``."""
        self._grid = grid
        self._rows = _table(grid, values)
        self._base = _table(grid, np.zeros_like(values) if base is None else base)
        self._per_token = _table(grid, np.zeros_like(values) if per_token is None else per_token)

    def ms(self, padded: int, kv_tokens: int, max_kv: int) -> float:
        """ms of a step; ``inf`` outside the grid."""
        grid = self._grid
        if padded >= len(grid.rows) or kv_tokens > grid.max_kv_tokens or max_kv > grid.max_kv:
            return inf
        row = grid.rows[padded]
        at = sqrt(kv_tokens) * grid.scale
        low = int(at)
        values = self._rows[row]
        ms = values[low] + (values[low + 1] - values[low]) * (at - low)
        longest = self._base[row][low] + self._per_token[row][low] * max_kv
        return longest if longest > ms else ms


def _table(grid: Grid, values: Array) -> list[list[float]]:
    """Rows by batch, the last column twice so that the maximum of KV tokens needs no special case."""
    table = values.reshape(len(grid.batches), STEPS + 1)
    rows: list[list[float]] = np.concatenate([table, table[:, -1:]], axis=1).tolist()
    return rows
