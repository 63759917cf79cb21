"""Errors of the routes under /v1 in OpenAI's shape, whoever answered: the routes, security, the engine."""

from __future__ import annotations

import json
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.api.description import answered
from core.api.openai_schemas import OpenAIError, OpenAIErrorBody

PREFIX = "/v1/"
# What cannot be carried out as it stands is 400 there; a client takes 409 for something that will pass by itself.
_STATUS = {409: 400, 422: 400}
_PLACES = 3
# For the routes' OpenAPI.
RESPONSES: dict[int | str, dict[str, Any]] = {
    status: answered(OpenAIErrorBody) for status in (400, 401, 403, 404, 413, 429, 503)
}
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def body(status: int, code: str | None, message: str, param: str | None = None) -> OpenAIErrorBody:
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return OpenAIErrorBody(error=OpenAIError(message=message, type=kind, param=param, code=code))


def translated(status: int, content: bytes) -> tuple[int, OpenAIErrorBody]:
    """(status, body) as OpenAI's API would answer, of an answer of ours or of the engine's."""
    try:
        found: Any = json.loads(content)
    except ValueError:
        found = {}
    # Ours and OpenAI's have {"error": {...}}, the engine's has the message at the top.
    error = found.get("error", found) if isinstance(found, dict) else {}
    if not isinstance(error, dict):
        error = {"message": str(error)}
    code, param = (error.get(name) if isinstance(error.get(name), str) else None for name in ("code", "param"))
    message = str(error.get("message") or content.decode("utf-8", "replace")[:300] or f"status {status}")
    if isinstance(found, dict) and isinstance(found.get("report"), dict):
        message += _places(found["report"])
    status = _STATUS.get(status, status)
    return status, body(status, code, message, param)


def _places(report: dict[str, Any]) -> str:
    """Where a refused file is at fault: OpenAI's shape has no place for the whole report."""
    faults = [found for found in report.get("findings", []) if found["level"] == "error"]
    return "".join(f"; {fault['message']}: {'; '.join(fault['examples'][:_PLACES])}" for fault in faults[:_PLACES])


class OpenAIErrors:
    """The middleware; the outermost of those that answer by themselves."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PREFIX):
            await self._app(scope, receive, send)
            return
        start: Message | None = None
        content = bytearray()

        async def sending(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and message["status"] >= 400:
                start = message
            elif start is None:
                await send(message)
            elif message["type"] == "http.response.body":
                content.extend(message.get("body", b""))
                if not message.get("more_body", False):
                    await _answer(send, start, bytes(content))

        await self._app(scope, receive, sending)


async def _answer(send: Send, start: Message, content: bytes) -> None:
    status, answer = translated(start["status"], content)
    data = answer.model_dump_json().encode()
    replaced = {b"content-length", b"content-type"}
    headers = [pair for pair in start.get("headers", []) if pair[0].lower() not in replaced]
    headers += [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({**start, "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})
