"""Fit the two-stage model to a profile.

Stage 1, decode alone on the partition p: ``t = a + b·B + b'·(B-64)+ + b''·(B-128)+ + max(c·K, d·Q)``, every
coefficient non-negative: the paper's plane in padded batch B and KV tokens K (section 4), with its slope in B rising
where the matrix products need another tile of 64 rows, and with a floor under attention. The floor is the queue Q of
the busiest SM (`core.predictor.sizes.queue_tokens`): attention of one request and KV head is one thread block, so with
few requests the step waits for the longest. An engine that splits long requests has d = 0.

Stage 2, beside a tasklet: each of the four terms (constant, batch, K, Q) times 1 + φ, φ non-negative. The paper has one
φ for all of them; where finetuning is confined but decode is not, they differ by a factor of three.

Neighbouring partitions inform each other: a coefficient is pulled towards a line in 1/SMs (φ: in the finetune part's
share of the SMs) that is fitted along with it, and what is then left of a measurement is spread over near sizes and
partitions by a Gaussian process. So a partition with few points is not fitted by those alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from core.predictor.nnls import nnls
from core.predictor.profile import Point
from core.predictor.residual import Residual
from core.predictor.sizes import KINDS, Array, Sizes, queue_tokens, sizes_of

_TILES = (64.0, 128.0)
_SCALE = np.array([5.0, 0.01, 0.01, 0.01, 3e-5, 3e-4])  # typical coefficients, so that pulls compare
_PULL_ALONE, _PULL_BESIDE = 0.3, 1.0  # weight of the common line against one measurement's relative error
_RIDGE = 1e-4
_SPREAD, _NOISE = 0.05, 0.01  # of the logarithmic residuals, and of a measurement itself


class TwoStage:
    """The fitted model. `ms` evaluates it; `alone` and `phi` are its coefficients, for people.

    alone: decode SMs → (a, b, b', b'', c, d); phi: (layout kind, finetune share) → φ of the four terms.
    """

    def __init__(self, points: list[Point], sms: int, kv_heads: int) -> None:
        """points: of one kind of tasklet, and those alone."""
        self._kv_heads = kv_heads
        sizes = sizes_of([(p.layout, p.beside is not None, p.batch, p.kv_tokens, p.max_kv) for p in points], sms)
        ms = np.array([point.ms for point in points])
        self._parts = np.unique(sizes.decode_sms)
        self._alone = self._fit_alone(sizes.take(~sizes.beside), ms[~sizes.beside], sms)
        self._shares: dict[int, Array] = {}
        self._phi: dict[int, Array] = {}
        for kind in (1, 2):
            chosen = (sizes.kind == kind) & sizes.beside
            if chosen.any():
                self._shares[kind] = np.unique(sizes.share[sizes.kind == kind])
                self._phi[kind] = self._fit_beside(sizes.take(chosen), ms[chosen], self._shares[kind])
        self._residual = Residual(sizes, np.log(ms / self._two_stage(sizes)), _SPREAD, _NOISE)

    @property
    def alone(self) -> dict[float, tuple[float, ...]]:
        return {float(n): tuple(map(float, row)) for n, row in zip(self._parts, self._alone, strict=True)}

    @property
    def phi(self) -> dict[tuple[str, float], tuple[float, ...]]:
        return {
            (KINDS[kind], float(share)): tuple(map(float, row))
            for kind, shares in self._shares.items()
            for share, row in zip(shares, self._phi[kind], strict=True)
        }

    def ms(self, sizes: Sizes) -> Array:
        """Predicted ms of each step; partitions must be among those fitted."""
        predicted: Array = self._two_stage(sizes) * np.exp(self._residual.at(sizes))
        return predicted

    def ms_of_queue(self, sizes: Sizes) -> Array:
        """Predicted ms of each step, were it only for the queue of the busiest SM."""
        constant, dense, _, by_queue = self._beside_terms(sizes).T
        predicted: Array = (constant + dense + by_queue) * np.exp(self._residual.at(sizes))
        return predicted

    def _two_stage(self, sizes: Sizes) -> Array:
        constant, dense, by_total, by_queue = self._beside_terms(sizes).T
        predicted: Array = constant + dense + np.maximum(by_total, by_queue)
        return predicted

    def _beside_terms(self, sizes: Sizes) -> Array:
        terms: Array = self._terms(sizes) * (1 + self._phi_of(sizes))
        return terms

    def _part(self, sizes: Sizes) -> NDArray[np.int64]:
        return np.searchsorted(self._parts, sizes.decode_sms)

    def _terms(self, sizes: Sizes) -> Array:
        """(constant, batch, K, Q) in ms of each step alone, of which the larger of the last two counts."""
        own = self._alone[self._part(sizes)]
        dense = (own[:, 1:4] * _tiles(sizes.batch)).sum(axis=1)
        by_queue = own[:, 5] * queue_tokens(sizes, self._kv_heads)
        return np.stack([own[:, 0], dense, own[:, 4] * sizes.kv_tokens, by_queue], axis=1)

    def _phi_of(self, sizes: Sizes) -> Array:
        phi = np.zeros((len(sizes), 4))
        for kind, shares in self._shares.items():
            chosen = (sizes.kind == kind) & sizes.beside
            phi[chosen] = self._phi[kind][np.searchsorted(shares, sizes.share[chosen])]
        return phi

    def _fit_alone(self, sizes: Sizes, ms: Array, sms: int) -> Array:
        """Coefficients (partitions, 6). Which of K and Q bounds a step depends on them: start from blocks that do not
        fill the SMs, then repeat with the answer."""
        part, queue = self._part(sizes), queue_tokens(sizes, self._kv_heads)
        by_queue = sizes.batch * self._kv_heads <= sizes.decode_sms
        line = sms / self._parts - 1
        fitted = np.zeros((len(self._parts), len(_SCALE)))
        for _ in range(8):
            columns = np.column_stack(
                [
                    np.ones_like(ms),
                    _tiles(sizes.batch),
                    np.where(by_queue, 0.0, sizes.kv_tokens),
                    np.where(by_queue, queue, 0.0),
                ]
            )
            fitted = _pooled(columns * _SCALE / ms[:, None], np.ones_like(ms), part, line, _PULL_ALONE / (1 + line))
            fitted *= _SCALE
            answer = fitted[part, 5] * queue > fitted[part, 4] * sizes.kv_tokens
            if np.array_equal(answer, by_queue):
                break
            by_queue = answer
        return fitted

    def _fit_beside(self, sizes: Sizes, ms: Array, shares: Array) -> Array:
        """φ (partitions, 4) of one kind of layout."""
        terms = self._terms(sizes)
        terms[:, 2:] *= terms[:, 2:] == terms[:, 2:].max(axis=1, keepdims=True)
        group = np.searchsorted(shares, sizes.share)
        pull = np.full(len(shares), _PULL_BESIDE)
        return _pooled(terms / ms[:, None], 1 - terms.sum(axis=1) / ms, group, shares, pull)


def _tiles(batch: Array) -> Array:
    return np.stack([batch, *(np.maximum(batch - tile, 0.0) for tile in _TILES)], axis=1)


def _pooled(columns: Array, target: Array, group: NDArray[np.int64], line: Array, pull: Array) -> Array:
    """Non-negative coefficients (groups, columns) of ``target ≈ columns @ coefficients[group]``, each pulled towards
    u + v·line[group] with non-negative u and v that are fitted too."""
    rows, n = columns.shape
    groups = len(line)
    own = groups * n
    a = np.zeros((rows + own, own + 2 * n))
    for row in range(rows):
        a[row, group[row] * n : (group[row] + 1) * n] = columns[row]
    for g in range(groups):
        for j in range(n):
            at = rows + g * n + j
            a[at, g * n + j] = pull[g]
            a[at, own + j] = -pull[g]
            a[at, own + n + j] = -pull[g] * line[g]
    ridge = _RIDGE * np.eye(a.shape[1])
    y = np.concatenate([target, np.zeros(own + a.shape[1])])
    return nnls(np.vstack([a, ridge]), y)[:own].reshape(groups, n)
