"""What is learnt while the engine runs: a correction of a prediction, and a bound over it."""

from __future__ import annotations

from collections.abc import Sequence

from core.predictor.window import RollingQuantile

_CLIP = 0.3  # one measurement moves a correction as if it were at most this far off: a hiccup is not a trend
WINDOW = 400


class Scale:
    """Recursive least squares of one factor near 1, with forgetting."""

    __slots__ = ("_forgetting", "_variance", "value")

    def __init__(self, forgetting: float, variance: float) -> None:
        """variance: of the factor before the first measurement, in units of a measurement's own."""
        self._forgetting = forgetting
        self._variance = variance
        self.value = 1.0

    def learn(self, ratio: float) -> None:
        """ratio: measured ÷ predicted with the present value."""
        gain = self._variance / (self._forgetting + self._variance)
        self._variance = (1 - gain) * self._variance / self._forgetting
        self.value *= 1 + gain * min(max(ratio - 1, -_CLIP), _CLIP)


class Bound:
    """Factors that measured ÷ predicted exceeds with probability `miss`, one per load bucket.

    A bucket with enough measurements has its own rolling conformal quantile, one with few that of all buckets, and
    while those are few too at least what was known before (`prior`).
    """

    __slots__ = ("_all", "_buckets", "_prior", "factors")

    def __init__(self, prior: Sequence[float], miss: float) -> None:
        self._prior = tuple(prior)
        self._all = RollingQuantile(WINDOW, miss)
        self._buckets = [RollingQuantile(WINDOW, miss) for _ in prior]
        self.factors = list(prior)

    def learn(self, bucket: int, ratio: float) -> None:
        """ratio: measured ÷ predicted."""
        self._all.push(ratio)
        self._buckets[bucket].push(ratio)
        self.factors[bucket] = self._factor(bucket)

    def fade(self) -> None:
        """Begin to forget where the bound is higher than what was known before: for what was not measured for long, so
        that a bound that was raised once does not forbid for good what it bounds."""
        for window, known in zip((self._all, *self._buckets), (max(self._prior), *self._prior), strict=True):
            if window.value is not None and window.value > known:
                window.forget_above(known)
        self.factors = [self._factor(bucket) for bucket in range(len(self._prior))]

    def _factor(self, bucket: int) -> float:
        own, shared, prior = self._buckets[bucket], self._all, self._prior[bucket]
        if own.value is not None and len(own) >= own.enough:
            return own.value
        if own.value is None or shared.value is None:
            return prior
        return shared.value if len(shared) >= shared.enough else max(shared.value, prior)
