"""Answers that many ask for at once, as dashboards do: made once, and given as they are until their tables change."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

from fastapi import Response
from pydantic import BaseModel, ValidationError
from starlette.types import Scope as AsgiScope

from core.control.context import Control
from core.control.principal import Principal
from db.scope import Scope
from db.store import Store

# How long figures that come by themselves, and changes made by another API process, may go unnoticed; one of this
# process is noticed at once.
_KEPT_S = 0.25
MEDIA_TYPE = "application/json"
# Made at a time; more threads would only take the interpreter from one another.
_AT_ONCE = 2


# Whose it is and what was asked for: all that an answer depends on, beside the store and the clock.
Key = tuple[Scope, str, bytes]


def key(principal: Principal, scope: AsgiScope) -> Key:
    """Of a GET."""
    return principal.scope, scope["path"], scope["query_string"]


@dataclass(frozen=True)
class Shared:
    """What many ask for at once: the parameters of its query, what makes the answer of them (JSON, as the principal of
    the context may see it), and the tables that it is made of."""

    query: type[BaseModel]
    make: Callable[[Control, Any], bytes]
    tables: Collection[str]

    def parameters(self, scope: AsgiScope) -> BaseModel | None:
        """Those of a request; None when it is for the route to say what is wrong with them."""
        try:
            return self.query.model_validate(dict(parse_qsl(scope["query_string"].decode("latin-1"), True)))
        except ValidationError:
            return None


@dataclass(eq=False)
class _Making:
    """An answer, or the way to it. `version` (of its tables) and `began` are None until a thread begins to make it."""

    tables: Collection[str]
    content: asyncio.Future[bytes] = field(init=False)
    version: int | None = None
    began: float | None = None

    def serves(self, version: int) -> bool:
        """Whether who asks now may have it. What is yet to begin will see all that there is to see now."""
        if self.began is None:
            return True
        if not self.content.done():
            return self.version == version
        young = time.monotonic() - self.began <= _KEPT_S
        return young and self.version == version and self.content.exception() is None


class Answers:
    """Belongs to the event loop."""

    def __init__(self, store: Store) -> None:
        self._written: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._kept: dict[Key, _Making] = {}
        self._threads = ThreadPoolExecutor(_AT_ONCE, "harli-answers")
        store.on_commit(self._note)

    def close(self) -> None:
        """Waits for what is being made."""
        self._threads.shutdown(cancel_futures=True)

    def _note(self, tables: frozenset[str]) -> None:
        """On the writer's thread, before the writer goes on: who is told that something was changed finds it so."""
        with self._lock:
            for table in tables:
                self._written[table] += 1

    def shared(self, key: Key) -> asyncio.Future[bytes] | None:
        """The answer, JSON, that is there or on its way for someone else; None when it has to be made."""
        found = self._kept.get(key)
        return found.content if found is not None and found.serves(self._version(found.tables)) else None

    def begin(self, key: Key, make: Callable[[], bytes], tables: Collection[str]) -> asyncio.Future[bytes]:
        """The answer, JSON, when there is none to be shared: `make` is called in a thread."""
        self._forget_old()
        self._kept.pop(key, None)
        making = self._kept[key] = _Making(tables)

        def run() -> bytes:
            making.version = self._version(tables)
            making.began = time.monotonic()
            return make()

        making.content = asyncio.get_running_loop().run_in_executor(self._threads, run)
        return making.content

    async def get(self, key: Key, make: Callable[[], bytes], tables: Collection[str]) -> Response:
        """The answer. It is made anew when there is none that is young enough, or this process has written to one of
        `tables` since. What `make` raises is raised for all who wait for it."""
        content = self.shared(key) or self.begin(key, make, tables)
        # Shielded: who hangs up takes nothing from the others.
        return Response(await asyncio.shield(content), media_type=MEDIA_TYPE)

    def _version(self, tables: Collection[str]) -> int:
        return sum(self._written[table] for table in tables)

    def _forget_old(self) -> None:
        """Those that began first stand first."""
        limit = time.monotonic() - _KEPT_S
        while self._kept:
            key, oldest = next(iter(self._kept.items()))
            if oldest.began is None or oldest.began > limit or not oldest.content.done():
                return
            del self._kept[key]
