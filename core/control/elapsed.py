"""How long things have been as they are, whatever becomes of the wall clock: that may be set while one waits, so that
the time since a moment of the store says little."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Elapsed(Generic[T]):
    """Of things that one thread looks at again and again, the time since each was first seen. `clock` gives seconds and
    is never set."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: dict[T, float] = {}

    def seconds(self, there: Iterable[T]) -> dict[T, float]:
        """Of each that is there; what is there no more is forgotten."""
        time_ = self._clock()
        self._first = {thing: self._first.get(thing, time_) for thing in there}
        return {thing: time_ - first for thing, first in self._first.items()}
