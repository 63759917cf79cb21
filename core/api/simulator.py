"""What-if questions to the simulator, which runs as a process of its own: it computes for seconds, and neither the
event loop nor the interpreter lock of the API may be held for that long."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import OrderedDict
from contextlib import suppress
from typing import Any

from core.errors import HarliError, Unavailable

_KEPT = 64  # answers
_TIMEOUT_S = 120.0


class Simulator:
    """Asks one question after the other; equal ones are answered once. Belongs to the event loop."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._answers: OrderedDict[str, asyncio.Task[dict[str, Any]]] = OrderedDict()

    async def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """The frontier as `core.simulate.worker` gives it. Raises the HarliError that it answers with, and Unavailable
        when it cannot be run."""
        key = json.dumps(question, sort_keys=True)
        task = self._answers.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._answers[key] = asyncio.create_task(self._ask(key))
            while len(self._answers) > _KEPT:
                self._answers.popitem(last=False)
        self._answers.move_to_end(key)
        # Who goes away does not take the answer from the others.
        return await asyncio.shield(task)

    async def stop(self) -> None:
        for task in self._answers.values():
            task.cancel()
        await self._end()

    async def _ask(self, question: str) -> dict[str, Any]:
        async with self._turn:
            line = await self._exchange(question)
        if not line:
            raise Unavailable("simulator", "the simulator ended without an answer; the API's log has its error output")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            fault = reply["error"]
            raise HarliError(fault["code"], fault["message"], fault["param"])
        frontier: dict[str, Any] = reply["frontier"]
        return frontier

    async def _exchange(self, question: str) -> bytes:
        """A line there and a line back; a process that left while nothing was asked is started again."""
        for fresh in (False, True):
            if self._process is None or self._process.returncode is not None or fresh:
                await self._end()
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "core.simulate.worker", stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE, limit=1 << 22,
                )  # fmt: skip
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            try:
                self._process.stdin.write(question.encode() + b"\n")
                await self._process.stdin.drain()
                line = await asyncio.wait_for(self._process.stdout.readline(), _TIMEOUT_S)
            except (TimeoutError, asyncio.CancelledError):
                await self._end()
                raise
            except (BrokenPipeError, ConnectionResetError):
                continue
            if line:
                return line
        return b""

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
