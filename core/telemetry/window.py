"""The last minutes in memory, raw: a dashboard's figures are exact and cost no query."""

from __future__ import annotations

import threading
from collections import deque

from core.telemetry.interval import Interval, merge

KEPT_S = 600.0


class Window:
    """Intervals of the last `KEPT_S` seconds, in order. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._intervals: deque[Interval] = deque()

    def add(self, interval: Interval) -> None:
        with self._lock:
            self._intervals.append(interval)
            while self._intervals[0].end < interval.end - KEPT_S:
                self._intervals.popleft()

    def last(self, seconds: float, now: float) -> Interval | None:
        """What ended in the `seconds` before `now` (Unix seconds) in one, None when nothing did."""
        with self._lock:
            recent = [interval for interval in self._intervals if interval.end > now - seconds]
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
        if self._second is not None and second > self._second:
            done = self.flush()
        self._second = max(second, self._second or 0)
        self._open.append(interval)
        return done

    def flush(self) -> tuple[int, Interval] | None:
        """What is open, as it is."""
        if self._second is None or not self._open:
            return None
        done = self._second, merge(self._open)
        self._open = []
        return done
