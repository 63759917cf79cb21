"""Long work of a request, for as long as the caller waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from fastapi import Request
from starlette.concurrency import run_in_threadpool

from core.control.operations import Work

T = TypeVar("T")
_LOOK_S = 0.25


async def while_connected(request: Request, work: Work, run: Callable[[], T]) -> T:
    """What `run` returns, on a thread; a caller who hangs up cancels the work. The body must have been read."""
    watcher = asyncio.create_task(_cancel_without(request, work))
    try:
        return await run_in_threadpool(run)
    finally:
        watcher.cancel()


async def _cancel_without(request: Request, work: Work) -> None:
    while not await request.is_disconnected():
        await asyncio.sleep(_LOOK_S)
    work.cancel()
