"""What a model leaves of its measurements, spread to sizes nearby: a Gaussian process with fixed reach."""

from __future__ import annotations

import numpy as np

from core.predictor.sizes import Array, Sizes

_OCTAVES, _SHARE = 2.5, 0.5  # reach in batch and KV tokens (octaves) and in share of the SMs
_ALONE_BESIDE = 0.8  # how much steps alone and beside have in common; kinds of layout have nothing


class Residual:
    """Expected residual at any size, 0 far from every measurement."""

    def __init__(self, sizes: Sizes, values: Array, spread: float, noise: float) -> None:
        """values: residuals at `sizes`; spread: their standard deviation; noise: that of one measurement."""
        self._sizes = sizes
        self._weights = np.linalg.solve(likeness(sizes, sizes) + (noise / spread) ** 2 * np.eye(len(sizes)), values)

    def at(self, sizes: Sizes) -> Array:
        """Residual at each of `sizes`."""
        values: Array = likeness(sizes, self._sizes) @ self._weights
        return values


def likeness(a: Sizes, b: Sizes) -> Array:
    """Correlation of the residuals of two sets of steps (rows, columns)."""
    distance = (
        ((np.log2(a.batch)[:, None] - np.log2(b.batch)) / _OCTAVES) ** 2
        + ((np.log2(a.kv_tokens)[:, None] - np.log2(b.kv_tokens)) / _OCTAVES) ** 2
        + ((a.share[:, None] - b.share) / _SHARE) ** 2
    )
    same = (a.kind[:, None] == b.kind) * np.where(a.beside[:, None] == b.beside, 1.0, _ALONE_BESIDE)
    likeness: Array = same * np.exp(-distance / 2)
    return likeness
