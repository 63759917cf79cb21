"""The engine's end of a link whose messages are there when the test goes on, however busy the machine is."""

from __future__ import annotations

from collections import deque

from core.link.messages import FromEngine, ToEngine
from core.link.transport import EngineEnd


class PromptEnd(EngineEnd):
    """`await_message` is called once for each message that was sent to it; `sent` counts those that it sent."""

    def __init__(self, url: str, engine_id: str) -> None:
        super().__init__(url, engine_id)
        self.sent = 0
        self._here: deque[ToEngine] = deque()

    def send(self, message: FromEngine) -> bool:
        taken = super().send(message)
        self.sent += taken
        return taken

    def await_message(self) -> None:
        message = super().receive(10_000)
        assert message is not None
        self._here.append(message)

    def receive(self, timeout_ms: int = 0) -> ToEngine | None:
        return self._here.popleft() if self._here else super().receive(timeout_ms)
