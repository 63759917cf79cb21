"""Answers that many ask for at once, as dashboards do: made once, and given as they are until the store changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from fastapi import Response
from pydantic import TypeAdapter
from starlette.concurrency import run_in_threadpool

from db.store import Store

# How long a change made by another API process may go unnoticed; one of this process is noticed at once.
_KEPT_S = 0.25
_MOST = 256


@dataclass(frozen=True)
class _Answer:
    version: int
    made: float
    content: bytes


class Answers:
    """Safe to use from any thread; `get` belongs to the event loop."""

    def __init__(self, store: Store) -> None:
        self._version = 0
        self._answers: dict[Hashable, _Answer] = {}
        self._making: dict[Hashable, threading.Lock] = {}
        store.on_commit(self._changed)

    def _changed(self) -> None:
        self._version += 1

    async def get(
        self, key: Hashable, make: Callable[[], Any], kind: TypeAdapter[Any], *, steady: bool = False
    ) -> Response:
        """The answer under a key, which names all that it depends on: whose it is and what was asked. `make` is called
        in a thread when there is none, or the store has changed since; `steady`: what it is made of changes by the
        clock, so that a change of the store is no reason. `kind` turns it into JSON."""
        content = self._fresh(key, steady)
        if content is None:
            content = await run_in_threadpool(self._made, key, make, kind, steady)
        return Response(content, media_type="application/json")

    def _fresh(self, key: Hashable, steady: bool) -> bytes | None:
        found = self._answers.get(key)
        if found is None or time.monotonic() - found.made > _KEPT_S:
            return None
        return found.content if steady or found.version == self._version else None

    def _made(self, key: Hashable, make: Callable[[], Any], kind: TypeAdapter[Any], steady: bool) -> bytes:
        if len(self._answers) >= _MOST:
            self._answers, self._making = {}, {}
        with self._making.setdefault(key, threading.Lock()):
            # Whoever waited here while another one made it takes that.
            content = self._fresh(key, steady)
            if content is None:
                version, made = self._version, time.monotonic()
                content = kind.dump_json(make())
                self._answers[key] = _Answer(version, made, content)
            return content
