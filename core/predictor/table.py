"""A fitted model written out over captured batch sizes, KV tokens and the longest request, so that looking one up takes
about a microsecond and the answer never falls when one of them rises."""

from __future__ import annotations

from bisect import bisect_left
from math import inf, sqrt

import numpy as np

from core.policy.types import Layout
from core.predictor.sizes import Array, Sizes, sizes_of

STEPS = 24  # tokens are tabulated at their maximum times (n / STEPS)²
_PER_BUCKET = 6  # steps of KV tokens in a load bucket; in batch a bucket is an octave
_TIERS = STEPS // _PER_BUCKET + 1


class Grid:
    """The sizes that tables cover: captured batches, KV tokens up to `max_kv_tokens`, requests up to `max_kv` tokens.

    rows: batch → row, a batch that was not captured having the row of the next larger one; kv_scale, length_scale:
    the column of a number of tokens is its square root times that; first_bucket: row → its first load bucket, of which
    there are `buckets` in all.
    """

    def __init__(self, captured: tuple[int, ...], max_kv_tokens: int, max_kv: int) -> None:
        self.batches = tuple(sorted(captured))
        self.rows = [bisect_left(self.batches, batch) for batch in range(self.batches[-1] + 1)]
        self.max_kv_tokens = max_kv_tokens
        self.max_kv = max_kv
        self.kv_scale = STEPS / sqrt(max_kv_tokens)
        self.length_scale = STEPS / sqrt(max_kv)
        self.first_bucket = [(batch.bit_length() - 1) * _TIERS for batch in self.batches]
        self.buckets = self.first_bucket[-1] + _TIERS

    def bucket_middles(self) -> tuple[Array, Array]:
        """Batch and KV tokens in the middle of each load bucket."""
        octave, tier = np.divmod(np.arange(self.buckets), _TIERS)
        kv = self.max_kv_tokens * (np.minimum(tier + 0.5, _TIERS - 1) * _PER_BUCKET / STEPS) ** 2
        return 1.5 * 2.0**octave, kv

    def by_kv_tokens(self, layout: Layout, beside: bool, sms: int) -> Sizes:
        """Every (batch, KV tokens), batches first, as if no request were long; a batch has no more tokens than requests
        of `max_kv` give it."""
        kv = self.max_kv_tokens * (np.arange(STEPS + 1) / STEPS) ** 2
        return sizes_of(
            [
                (layout, beside, batch, min(max(tokens, batch), batch * self.max_kv), 0.0)
                for batch in self.batches
                for tokens in kv
            ],
            sms,
        )

    def by_length(self, layout: Layout, beside: bool, sms: int) -> Sizes:
        """Every (batch, tokens of the longest request), batches first, the others being as long."""
        lengths = self.max_kv * (np.arange(STEPS + 1) / STEPS) ** 2
        return sizes_of([(layout, beside, b, b * max(n, 1.0), max(n, 1.0)) for b in self.batches for n in lengths], sms)


class StepTable:
    """A duration in ms of a decode step: the longer of what its KV tokens and what its longest request ask for."""

    __slots__ = ("_by_kv", "_by_length", "_grid")

    def __init__(self, grid: Grid, by_kv: Array, by_length: Array) -> None:
        """by_kv: ms at `Grid.by_kv_tokens`; by_length: ms at `Grid.by_length`. Both are levelled where they fall."""
        self._grid = grid
        self._by_kv = _rows(_rising(_shaped(grid, by_kv)))
        self._by_length = _rows(_rising(_shaped(grid, by_length)))

    def ms(self, padded: int, kv_tokens: int, max_kv: int) -> float:
        """ms of a step; ``inf`` outside the grid."""
        return self.look_up(padded, kv_tokens, max_kv)[0]

    def look_up(self, padded: int, kv_tokens: int, max_kv: int) -> tuple[float, int]:
        """ms of a step and its load bucket; ``inf`` and 0 outside the grid."""
        grid = self._grid
        if padded >= len(grid.rows) or kv_tokens > grid.max_kv_tokens or max_kv > grid.max_kv:
            return inf, 0
        row = grid.rows[padded]
        at = sqrt(kv_tokens) * grid.kv_scale
        low = int(at)
        values = self._by_kv[row]
        ms = values[low] + (values[low + 1] - values[low]) * (at - low)
        bucket = grid.first_bucket[row] + low // _PER_BUCKET
        if max_kv:
            at = sqrt(max_kv) * grid.length_scale
            low = int(at)
            values = self._by_length[row]
            longest = values[low] + (values[low + 1] - values[low]) * (at - low)
            if longest > ms:
                return longest, bucket
        return ms, bucket


class FactorTable:
    """A factor that depends on the decode step next to it, at the nearest tabulated size."""

    __slots__ = ("_grid", "_rows")

    def __init__(self, grid: Grid, factors: Array) -> None:
        """factors: at `Grid.by_kv_tokens`."""
        self._grid = grid
        self._rows = _rows(_shaped(grid, factors))

    def factor(self, padded: int, kv_tokens: int) -> float:
        """The factor; ``inf`` outside the grid."""
        grid = self._grid
        if padded >= len(grid.rows) or kv_tokens > grid.max_kv_tokens:
            return inf
        return self._rows[grid.rows[padded]][int(sqrt(kv_tokens) * grid.kv_scale + 0.5)]


def _shaped(grid: Grid, values: Array) -> Array:
    return values.reshape(len(grid.batches), STEPS + 1)


def _rising(table: Array) -> Array:
    """The middle between the lowest table above it and the highest below it that never fall along rows or columns."""
    above = np.maximum.accumulate(np.maximum.accumulate(table, axis=0), axis=1)
    below = np.minimum.accumulate(np.minimum.accumulate(table[::-1, ::-1], axis=0), axis=1)[::-1, ::-1]
    middle: Array = (above + below) / 2
    return middle


def _rows(table: Array) -> list[list[float]]:
    """Rows by batch, the last column twice so that the maximum of tokens needs no special case."""
    rows: list[list[float]] = np.concatenate([table, table[:, -1:]], axis=1).tolist()
    return rows
