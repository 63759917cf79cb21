"""Long work of a request: for as long as the caller waits for it, or on by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from fastapi import Request
from starlette.concurrency import run_in_threadpool

from core.control.operations import Work

T = TypeVar("T")
_LOOK_S = 0.25


class Running:
    """The work of all requests, on threads. Belongs to the event loop."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[object], Work] = {}

    def start(self, work: Work, run: Callable[[], T]) -> asyncio.Task[T]:
        task = asyncio.create_task(run_in_threadpool(run))
        self._tasks[task] = work
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[object]) -> None:
        del self._tasks[task]
        if not task.cancelled():
            task.exception()  # its operation tells of it; nobody else may be left to do so

    async def stop(self) -> None:
        """Cancel all of it, and wait until it has ended."""
        for work in self._tasks.values():
            work.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def while_connected(request: Request, work: Work, run: Callable[[], T], wait_s: float | None = None) -> T | None:
    """What `run` returns, on a thread; None when it takes longer than `wait_s` (None: whatever it takes) and goes on by
    itself. A caller who hangs up before that cancels the work. The body must have been read."""
    running: Running = request.app.state.running
    task = running.start(work, run)
    watcher = asyncio.create_task(_cancel_without(request, work))
    try:
        await asyncio.wait({task}, timeout=wait_s)
    except asyncio.CancelledError:
        work.cancel()
        raise
    finally:
        watcher.cancel()
    return task.result() if task.done() else None


async def _cancel_without(request: Request, work: Work) -> None:
    while not await request.is_disconnected():
        await asyncio.sleep(_LOOK_S)
    work.cancel()
