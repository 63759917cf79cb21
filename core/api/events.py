"""Server-sent events: what the store notes as changed, and the engine's figures once a second."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

import anyio
from sqlalchemy.exc import SQLAlchemyError
from sse_starlette import ServerSentEvent
from starlette.concurrency import run_in_threadpool

from core.api import schemas
from core.control import telemetry
from core.control.context import Control
from db import changes
from db.changes import ChangeRecord
from db.scope import Scope

# Changes of other API processes are looked for this often, this one's are sent at once.
_POLL_S = 0.5
_TELEMETRY_S = 1.0
_BATCH = 500
_BACKLOG = 2000
# Topics of the platform; all others are of something that a tenant owns.
_EVERYONES = frozenset({"engine", "targets", "telemetry"})


@dataclass(eq=False)
class _Stream:
    """One connection: whose changes it is told, and those that wait to be sent; None is its end."""

    scope: Scope
    waiting: asyncio.Queue[ServerSentEvent | None] = field(default_factory=lambda: asyncio.Queue(_BACKLOG))

    def sees(self, change: ChangeRecord) -> bool:
        return change.topic in _EVERYONES or self.scope.everything or change.tenant == self.scope.tenant


class Broadcaster:
    """Reads the changes once for all connections of this process. Belongs to the event loop but for `wake`."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._streams: set[_Stream] = set()
        self._woken = asyncio.Event()
        # The last change that was sent; None while no one listens.
        self._last: int | None = None
        self._loop = asyncio.get_running_loop()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._control.store.on_commit(self.wake)
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._measure())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def wake(self, written: frozenset[str]) -> None:
        """From any thread: something was committed."""
        if ChangeRecord.__tablename__ in written and self._streams:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._woken.set)

    async def events(self, scope: Scope, last_id: int | None, ending: anyio.Event) -> AsyncIterator[ServerSentEvent]:
        """One connection's events, of what its scope shows: those after `last_id` that are still kept, then what comes.
        Ends with `ending`, and when its reader falls too far behind; it may come again with the last id that it has.

        What happens once this has answered is among them: a reader who sees the stream open misses nothing of what it
        then does."""
        sent = await run_in_threadpool(self._last_id)
        if last_id is not None:
            sent = min(sent, last_id)
        return self._events(_Stream(scope), sent, ending)

    async def _events(self, stream: _Stream, sent: int, ending: anyio.Event) -> AsyncIterator[ServerSentEvent]:
        self._streams.add(stream)
        try:
            while missed := await run_in_threadpool(self._after, sent):
                for change in missed:
                    sent = change.id
                    if stream.sees(change):
                        yield _event(change)
            if self._last is None:
                self._last = sent
                self._woken.set()  # what was committed meanwhile has woken nobody
            while (event := await _next(stream.waiting, ending)) is not None:
                if event.id is None or int(event.id) > sent:
                    yield event
        finally:
            self._streams.discard(stream)

    async def _follow(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), _POLL_S)
            self._woken.clear()
            if not self._streams:
                self._last = None
            if self._last is None:
                continue
            with contextlib.suppress(SQLAlchemyError):
                while found := await run_in_threadpool(self._after, self._last):
                    self._last = found[-1].id
                    for change in found:
                        self._send(_event(change), [stream for stream in self._streams if stream.sees(change)])

    async def _measure(self) -> None:
        while True:
            await asyncio.sleep(_TELEMETRY_S)
            if not self._streams:
                continue
            with contextlib.suppress(SQLAlchemyError):
                live = await run_in_threadpool(telemetry.live, self._control, 60.0)
                if live.now is not None:
                    data = live.now.model_dump(mode="json")
                    event = schemas.Event(topic="telemetry", kind="point", time=datetime.now(UTC), data=data)
                    self._send(ServerSentEvent(event.model_dump_json(), event=event.topic), list(self._streams))

    def _send(self, event: ServerSentEvent, streams: list[_Stream]) -> None:
        for stream in streams:
            try:
                stream.waiting.put_nowait(event)
            except asyncio.QueueFull:
                self._streams.discard(stream)
                stream.waiting.get_nowait()
                stream.waiting.put_nowait(None)

    def _last_id(self) -> int:
        with self._control.store.read() as session:
            return changes.last_id(session)

    def _after(self, last_id: int) -> list[ChangeRecord]:
        with self._control.store.read() as session:
            return changes.after(session, last_id, _BATCH)


async def _next(stream: asyncio.Queue[ServerSentEvent | None], ending: anyio.Event) -> ServerSentEvent | None:
    """The stream's next event; None once it is over."""
    getting, over = asyncio.ensure_future(stream.get()), asyncio.ensure_future(ending.wait())
    try:
        await asyncio.wait({getting, over}, return_when=asyncio.FIRST_COMPLETED)
        return getting.result() if getting.done() else None
    finally:
        getting.cancel()
        over.cancel()


def _event(change: ChangeRecord) -> ServerSentEvent:
    event = schemas.Event(topic=change.topic, kind=change.kind, id=change.ref, time=change.time, data=change.data)
    return ServerSentEvent(event.model_dump_json(), event=event.topic, id=str(change.id))
