"""`harli doctor` for the console: a process of its own, since it imports the engine's libraries to look at them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from datetime import UTC, datetime

from core.api import schemas
from core.errors import Unavailable

_FRESH_S = 60.0
_TIMEOUT_S = 120.0


class Examination:
    """The last report; however many ask, one examination runs at a time. Belongs to the event loop."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._last: schemas.Doctor | None = None
        self._taken = 0.0

    async def report(self) -> schemas.Doctor:
        """Raises Unavailable when the examination does not come to an end."""
        async with self._turn:
            if self._last is None or time.monotonic() - self._taken > _FRESH_S:
                self._last = await _examine()
                self._taken = time.monotonic()
            return self._last


async def _examine() -> schemas.Doctor:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "core.cli", "doctor", "--json", stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, preexec_fn=lambda: os.nice(19),
    )  # fmt: skip
    try:
        output, errors = await asyncio.wait_for(process.communicate(), _TIMEOUT_S)
        found = json.loads(output)
    except (TimeoutError, asyncio.CancelledError):
        process.kill()
        await process.wait()
        raise
    except ValueError as error:
        last = errors.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise Unavailable("doctor", f"`harli doctor` failed: {' '.join(last) or 'no output'}") from error
    return schemas.Doctor.model_validate({**found, "at": datetime.now(UTC)})
