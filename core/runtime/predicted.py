"""What the executor expects of steps and tasklets where a predictor plans them."""

from __future__ import annotations

from collections.abc import Callable

from core.policy.types import Layout, Predictor, TaskletKind
from core.runtime.executor import Expected, Size


class Predicted:
    """The executor's `Expectation`; ms. predictor: the one that plans, asked for each time: once a profile is taken it
    is another one."""

    def __init__(self, predictor: Callable[[], Predictor]) -> None:
        self._predictor = predictor

    def decode_ms(self, layout: Layout, size: Size, beside: TaskletKind | None) -> float:
        """Of a step on average; ``inf`` outside what was measured."""
        return self._predictor().decode_ms(layout, size.padded, size.kv_tokens, size.max_kv, beside)

    def tasklet_ms(self, layout: Layout, kind: TaskletKind, size: Size) -> Expected:
        """Of a tasklet; ``inf`` for what was not measured."""
        predictor, at = self._predictor(), (layout, kind, size.padded, size.kv_tokens)
        return Expected(predictor.tasklet_mean_ms(*at), predictor.tasklet_ms(*at))
