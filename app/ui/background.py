"""Answers that take seconds, fetched in a thread of their own: a page draws what there is and looks again at its next
refresh, so that nothing on it waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from core.errors import HarliError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """What is known by now: the last value (None before the first), and the error of the last try when it failed."""

    value: T | None = None
    error: HarliError | None = None


class Background(Generic[T]):
    """One answer, shared by all tabs; fetched anew by the first look after `fresh_s` seconds."""

    def __init__(self, fresh_s: float) -> None:
        self._fresh_s = fresh_s
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="background")
        self._running: Future[None] | None = None
        self._answer: Answer[T] = Answer()
        self._at = -float("inf")

    def look(self, fetch: Callable[[], T]) -> Answer[T]:
        """The last answer, at once. `fetch` is called in the background when that is too old, and raises HarliError."""
        with self._lock:
            idle = self._running is None or self._running.done()
            if idle and time.monotonic() - self._at > self._fresh_s:
                self._running = self._pool.submit(self._fetch, fetch)
            return self._answer

    def _fetch(self, fetch: Callable[[], T]) -> None:
        try:
            answer: Answer[T] = Answer(fetch())
        except HarliError as error:
            answer = Answer(self._answer.value, error)
        with self._lock:
            self._answer, self._at = answer, time.monotonic()
