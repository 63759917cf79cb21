"""Server-sent events, and when to take up a stream of them again."""

from __future__ import annotations

import time
from dataclasses import dataclass

from core.api import schemas
from core.client.steps import Request

RETRY_S = 0.5
_RECONNECT_S = 30.0
_SILENCE_S = 60.0


@dataclass(frozen=True)
class Sent:
    id: str
    data: str


class ServerSent:
    """Puts events together from lines."""

    def __init__(self) -> None:
        self._id = ""
        self._data: list[str] = []

    def feed(self, line: str) -> Sent | None:
        """The event that the line ends, if it has data."""
        if line:
            if line.startswith("data:"):
                self._data.append(line[5:].removeprefix(" "))
            elif line.startswith("id:"):
                self._id = line[3:].strip()
            return None
        data, self._data = self._data, []
        return Sent(self._id, "\n".join(data)) if data else None


class Following:
    """Where a reader of ``/api/events`` is, across broken connections."""

    def __init__(self, last_id: int | None) -> None:
        self._last_id = last_id
        self._away_since: float | None = None
        self._sent = ServerSent()

    def request(self) -> Request:
        headers = {} if self._last_id is None else {"Last-Event-ID": str(self._last_id)}
        return Request("GET", "/api/events", headers=headers, read_timeout_s=_SILENCE_S)

    def connected(self) -> None:
        self._away_since = None
        self._sent = ServerSent()

    def feed(self, line: str) -> schemas.Event | None:
        sent = self._sent.feed(line)
        if sent is None:
            return None
        self._last_id = int(sent.id) if sent.id else self._last_id
        return schemas.Event.model_validate_json(sent.data)

    def may_retry(self) -> bool:
        """After a failure: whether the API has not been away for too long."""
        self._away_since = self._away_since or time.monotonic()
        return time.monotonic() - self._away_since <= _RECONNECT_S
