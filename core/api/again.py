"""The short way: what many ask for (`answers.Shared`) is answered before the rest of the application is asked, again
where it was answered a moment ago. Hundreds of dashboards' requests a second come this way, so that it does nothing
twice and nothing for later.

It lets through what the gate would let through, and leaves all else to the gate: whoever is not known at this moment,
has used up the rate, is to be noted as a token in use, or comes from a page of another origin.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

from starlette.types import ASGIApp, Receive, Scope, Send

from core.api.answers import MEDIA_TYPE, Answers, Shared, key
from core.api.gate import Buckets, payer, shown_token
from core.control.context import Control
from core.control.tokens import Tokens

# As the CORS middleware says of what is answered without an Origin.
_HEADERS = ((b"content-type", MEDIA_TYPE.encode()), (b"vary", b"Origin"))


class Again:
    """The middleware, inside the one that knows foreign pages. `buckets` are the gate's, `shared` is by path."""

    def __init__(self, app: ASGIApp, buckets: Buckets, shared: Mapping[str, Shared]) -> None:
        self._app = app
        self._buckets = buckets
        self._shared = shared

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        content = await self._content(scope) if scope["type"] == "http" and scope["method"] == "GET" else None
        if content is None:
            await self._app(scope, receive, send)
            return
        headers = [(b"content-length", str(len(content)).encode()), *_HEADERS]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _content(self, scope: Scope) -> bytes | None:
        shared = self._shared.get(scope["path"])
        token = shown_token(scope)
        if shared is None or token is None or any(name == b"origin" for name, _ in scope["headers"]):
            return None
        tokens: Tokens = scope["app"].state.tokens
        principal = tokens.known(token)
        if principal is None:
            return None
        answers: Answers = scope["app"].state.answers
        place = key(principal, scope)
        content = answers.shared(place)
        asked = shared.parameters(scope) if content is None else None
        if (content is None and asked is None) or self._buckets.take(payer(principal)):
            return None
        if content is None:
            control: Control = scope["app"].state.control
            content = answers.begin(place, partial(shared.make, control.of(principal), asked), shared.tables)
        try:
            return content.result() if content.done() else await asyncio.shield(content)
        except Exception:
            return None  # its route tells why
