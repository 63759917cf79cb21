"""A fitted model written out over captured batch sizes, KV tokens and the queue of the busiest SM, so that looking one
up takes about a microsecond and the answer never falls when batch, KV tokens or the longest request grow."""

from __future__ import annotations

from bisect import bisect_left
from math import ceil, inf, sqrt

import numpy as np

from core.policy.types import Layout
from core.predictor.profile import Profile
from core.predictor.sizes import Array, Sizes, decode_sms, sizes_of

STEPS = 24  # tokens are tabulated at their maximum times (n / STEPS)²
_PER_BUCKET = 6  # steps of KV tokens in a load bucket; in batch a bucket is an octave
_TIERS = STEPS // _PER_BUCKET + 1


class Grid:
    """The sizes that tables cover: captured batches, KV tokens up to `max_kv_tokens`, requests up to `max_kv` tokens,
    on a device of `sms` SMs with a model of `kv_heads` KV heads.

    rows: batch → row, a batch that was not captured having the row of the next larger one; kv_scale: the column of a
    number of KV tokens is its square root times that; first_bucket: row → its first load bucket, of which there are
    `buckets` in all.
    """

    def __init__(self, captured: tuple[int, ...], max_kv_tokens: int, max_kv: int, sms: int, kv_heads: int) -> None:
        self.batches = tuple(sorted(captured))
        self.rows = [bisect_left(self.batches, batch) for batch in range(self.batches[-1] + 1)]
        self.max_kv_tokens = max_kv_tokens
        self.max_kv = max_kv
        self.sms = sms
        self._kv_heads = kv_heads
        self.kv_scale = STEPS / sqrt(max_kv_tokens)
        self.first_bucket = [(batch.bit_length() - 1) * _TIERS for batch in self.batches]
        self.buckets = self.first_bucket[-1] + _TIERS

    def bucket_middles(self) -> tuple[Array, Array]:
        """Batch and KV tokens in the middle of each load bucket."""
        octave, tier = np.divmod(np.arange(self.buckets), _TIERS)
        kv = self.max_kv_tokens * (np.minimum(tier + 0.5, _TIERS - 1) * _PER_BUCKET / STEPS) ** 2
        return 1.5 * 2.0**octave, kv

    def share(self, layout: Layout) -> float:
        """What one SM that decodes has of all blocks' KV tokens, to the tokens of all requests."""
        return self._kv_heads / decode_sms(layout, self.sms)

    def waves(self, layout: Layout) -> list[int]:
        """Blocks of the busiest SM at most, of each captured batch."""
        return [ceil(batch * self.share(layout)) for batch in self.batches]

    def max_queue(self, layout: Layout) -> float:
        """KV tokens of the busiest SM at most (`core.predictor.sizes.queue_tokens`)."""
        return self.share(layout) * self.max_kv_tokens + self.max_kv

    def by_kv_tokens(self, layout: Layout, beside: bool) -> Sizes:
        """Every (batch, KV tokens), batches first, as if no request were long; a batch has no more tokens than requests
        of `max_kv` give it."""
        kv = self.max_kv_tokens * (np.arange(STEPS + 1) / STEPS) ** 2
        return sizes_of(
            [
                (layout, beside, batch, min(max(tokens, batch), batch * self.max_kv), 0.0)
                for batch in self.batches
                for tokens in kv
            ],
            self.sms,
        )

    def by_queue(self, layout: Layout, beside: bool) -> Sizes:
        """Every (batch, KV tokens of the busiest SM), batches first: of requests that are all alike."""
        queues = self.max_queue(layout) * (np.arange(STEPS + 1) / STEPS) ** 2
        rows = [
            (batch, min(max(queue / waves, 1.0), self.max_kv))
            for batch, waves in zip(self.batches, self.waves(layout), strict=True)
            for queue in queues
        ]
        return sizes_of([(layout, beside, batch, batch * longest, longest) for batch, longest in rows], self.sms)


def grid_of(profile: Profile) -> Grid:
    """The sizes that a profile covers."""
    points = profile.points
    most, longest = max(point.kv_tokens for point in points), max(point.max_kv for point in points)
    return Grid(profile.captured, most, longest, profile.machine.sms, profile.kv_heads)


class StepTable:
    """A duration in ms of a decode step: the longer of what its KV tokens and what the busiest SM's queue ask for."""

    __slots__ = ("_by_kv", "_by_queue", "_grid", "_queue_scale", "_share", "_waves")

    def __init__(self, grid: Grid, layout: Layout, by_kv: Array, by_queue: Array) -> None:
        """by_kv: ms at `Grid.by_kv_tokens`; by_queue: ms at `Grid.by_queue`. Both are levelled where they fall."""
        self._grid = grid
        self._by_kv = _rows(_rising(_shaped(grid, by_kv)))
        self._by_queue = _rows(_rising(_shaped(grid, by_queue)))
        self._share, self._waves = grid.share(layout), grid.waves(layout)
        self._queue_scale = STEPS / sqrt(grid.max_queue(layout))

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
            queue, most = self._share * kv_tokens + max_kv, self._waves[row] * max_kv
            at = sqrt(queue if queue < most else most) * self._queue_scale
            low = int(at)
            values = self._by_queue[row]
            queued = values[low] + (values[low + 1] - values[low]) * (at - low)
            if queued > ms:
                return queued, bucket
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
