"""The demonstration: the sample traffic reaches the engine."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import UTC, datetime

import pytest

from core.demo import traffic
from tests.stack import Stack


@pytest.mark.engine
def test_the_sample_traffic_reaches_the_engine(stack: Stack) -> None:
    began = datetime.now(UTC)

    def decoded() -> float:
        points = [point for point in stack.client.telemetry(seconds=300) if point.time >= began]
        return sum(point.decode_tokens_s * point.interval_s for point in points)

    async def until_answered() -> None:
        asking = asyncio.create_task(traffic(stack.client, stack.settings))
        async with asyncio.timeout(240):
            while await asyncio.to_thread(decoded) <= 40 and not asking.done():  # of three answers of about 40
                await asyncio.sleep(0.5)
        assert asking.cancel(), "traffic goes on for ever"
        with contextlib.suppress(asyncio.CancelledError):
            await asking

    asyncio.run(until_answered())
