"""The last minutes in memory, raw: a dashboard's figures are exact and cost no query."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from core.telemetry.interval import Interval, merge

KEPT_S = 600.0
# No report comes so late: the clock that they are dated by was set back.
_LATE_S = 5.0


class Window:
    """Intervals of the last `KEPT_S` seconds, in order, by a `clock` (seconds) that, unlike the one that they are dated
    by, is never set. Safe to share between threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._intervals: deque[tuple[float, Interval]] = deque()

    def add(self, interval: Interval, age_s: float = 0.0) -> None:
        """Take in what ended `age_s` seconds ago."""
        with self._lock:
            time_ = self._clock()
            self._intervals.append((time_ - age_s, interval))
            while self._intervals and self._intervals[0][0] < time_ - KEPT_S:
                self._intervals.popleft()

    def last(self, seconds: float) -> Interval | None:
        """What ended in the last `seconds` in one, None when nothing did."""
        with self._lock:
            since = self._clock() - seconds
            recent = [interval for end, interval in self._intervals if end > since]
        return merge(recent) if recent else None


class Seconds:
    """Folds intervals into whole seconds: what ends in a second belongs to it. One thread's."""

    def __init__(self) -> None:
        self._second: int | None = None
        self._open: list[Interval] = []

    def add(self, interval: Interval) -> tuple[int, Interval] | None:
        """Take an interval in; the second that it shows to be over, (its start, Unix seconds) and all of it."""
        second = int(interval.end)
        done = None
        if self._second is None or second > self._second or second < self._second - _LATE_S:
            done = self.flush()
            self._second = second
        self._open.append(interval)
        return done

    def flush(self) -> tuple[int, Interval] | None:
        """What is open, as it is."""
        if self._second is None or not self._open:
            return None
        done = self._second, merge(self._open)
        self._open = []
        return done
