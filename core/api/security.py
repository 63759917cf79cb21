"""From where the API may be spoken to: no page from elsewhere may do so through a browser on this machine.

A request with an Origin (browsers send one with every change) is refused unless that is the console or the API itself;
while the API listens on a loopback address, so is one whose Host is another name (a page whose name was rebound to
127.0.0.1). Programs send no Origin.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from core.api.errors import answer
from core.config import LOOPBACK, Settings

_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_LOOKED_AT = frozenset({b"host", b"origin"})


def origins(settings: Settings) -> list[str]:
    """The origins of the console and of the API's own pages."""
    hosts = sorted(LOOPBACK | {settings.host})
    shown = [f"[{host}]" if ":" in host else host for host in hosts]
    return [f"http://{host}:{port}" for host in shown for port in (settings.console_port, settings.api_port)]


class SameMachine:
    """The middleware."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._origins = frozenset(origins(settings))
        self._hosts = LOOPBACK if settings.is_local else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (reason := self._reason(scope)) is not None:
            await answer(403, "foreign_origin", reason)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _reason(self, scope: Scope) -> str | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"] if name in _LOOKED_AT}
        host = urlsplit(f"//{headers.get(b'host', '')}").hostname
        if self._hosts is not None and host is not None and host not in self._hosts:
            return (
                f"the API listens on this machine only and was addressed as {host}; use 127.0.0.1, or set HARLI_HOST "
                "to the address that it should listen on"
            )
        origin = headers.get(b"origin")
        if scope["method"] not in _SAFE and origin is not None and origin not in self._origins:
            return f"a page of {origin} may not change anything here; use the console, or a program"
        return None
