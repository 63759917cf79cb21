"""Requests for the engine's own routes, passed on to it and its answers back, streams piece by piece."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from core.api import openai_errors
from core.control import openai_models as models
from core.control.context import Control
from core.errors import Invalid, TooLarge, Unavailable

_MAX_BODY = 32 << 20
_CONNECT_S = 5.0
# Between two pieces of an answer, the first of which may wait behind others.
_SILENCE_S = 300.0
# SGLang closes a connection that was idle for 5 s, and would do so while a request is on its way.
_IDLE_S = 2.0
_SENT = "text/event-stream"


def client() -> httpx.AsyncClient:
    """For the life of the application; it has as many connections as there are answers."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(_SILENCE_S, connect=_CONNECT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=32, keepalive_expiry=_IDLE_S),
        trust_env=False,
    )


async def forward(request: Request, control: Control, path: str) -> Response:
    """Ask the engine at `path` what the request asks. Its ``model`` is the served one's name (or left out), or that of
    a deployed adapter. When the reader of a stream goes away, the engine is told so and ends the generation."""
    body = await _body(request)
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise Invalid("model", f"model is {model!r}; give the name of a model", "model")
    served = await run_in_threadpool(models.served, control, model)
    http: httpx.AsyncClient = request.app.state.engine_http
    sent = http.build_request(
        "POST",
        f"{served.url}{path}",
        content=json.dumps({**body, "model": served.model}),
        headers={"accept-encoding": "identity", "content-type": "application/json"},
    )
    try:
        answer = await http.send(sent, stream=True)
        kind = answer.headers.get("content-type", "application/json")
        if kind.startswith(_SENT) and answer.status_code < 400:
            return StreamingResponse(_events(answer), answer.status_code, media_type=_SENT)
        try:
            return Response(await answer.aread(), answer.status_code, media_type=kind)
        finally:
            await answer.aclose()
    except httpx.HTTPError as error:
        raise Unavailable("engine_unreachable", _broken(served.url, error), "model") from error


async def _body(request: Request) -> dict[str, Any]:
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > _MAX_BODY:
            raise TooLarge("request_too_large", f"the request is larger than {_MAX_BODY} bytes; shorten it")
    try:
        found = json.loads(content, parse_constant=_no_json)
    except (ValueError, RecursionError) as error:
        raise Invalid("json", f"the body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise Invalid("json", f"the body is a JSON {type(found).__name__}; send an object")
    return found


def _no_json(word: str) -> None:
    raise ValueError(f"{word} is not a value of it")


async def _events(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Whole events only, so that the error of a broken connection is one that a client reads as such."""
    pending = b""
    try:
        async for chunk in answer.aiter_raw():
            pending += chunk
            end = pending.rfind(b"\n\n") + 2
            if end > 1:
                yield pending[:end]
                pending = pending[end:]
        yield pending
    except httpx.HTTPError as error:
        said = openai_errors.body(503, "engine_unreachable", _broken(str(answer.url), error))
        yield f"data: {said.model_dump_json()}\n\n".encode()
    finally:
        await answer.aclose()


def _broken(url: str, error: httpx.HTTPError) -> str:
    return f"the engine at {url} broke off: {str(error) or type(error).__name__}; try again when it is back"
