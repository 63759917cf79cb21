"""The one way in: every request passes here before its route, whoever wrote it.

A token is asked for, its user's role and its scopes are held against what the request wants, its rate and the size of
its body are bounded, and a request that is to change something leaves a line in the audit log, whether it changes
anything or not. What was answered to someone else a moment ago does not come this far (`again`).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import MutableMapping
from typing import Any

from fastapi import HTTPException
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.api.errors import answer, store_unavailable
from core.config import Settings
from core.control import audit
from core.control.context import Control
from core.control.principal import NOBODY, Principal
from core.control.tokens import Tokens
from core.errors import Forbidden, HarliError, TooManyRequests, Unauthorized
from db.audit import Actor
from db.store import OUTAGE

logger = logging.getLogger(__name__)

SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
# Open to all: a sign of life, and what a browser needs to show the documentation.
PUBLIC = frozenset({"/api/health", "/api/docs", "/api/docs/oauth2-redirect", "/api/openapi.json"})
METRICS = "/metrics"
# What a token must have in its scopes to change something under a path. What is not named needs an admin.
_AREAS = {
    "/api/datasets": "datasets",
    "/api/uploads": "datasets",
    "/api/operations": "datasets",
    "/v1/files": "datasets",
    "/api/jobs": "jobs",
    "/api/schedules": "jobs",
    "/api/webhooks": "jobs",
    "/v1/fine_tuning": "jobs",
    "/api/adapters": "adapters",
    "/v1/models": "adapters",
    "/api/targets": "targets",
    "/api/alerts": "targets",
}
# These are asked by POST, and nothing is changed by that; where it is a model, the route bounds the body.
ASKS = ("/v1/chat/completions", "/v1/completions", "/api/jobs/estimate")
# Nothing is changed by these either, but they take files, and so are for those who may change something there.
LOOKS = ("/api/uploads/preview",)
# What the machine is and how it is set up concerns those who run it.
_PLATFORM = ("/api/settings", "/api/doctor")
# These take files, whose size the routes bound while they come.
UPLOADS = ("/api/datasets", "/api/uploads", "/api/adapters", "/v1/files")
MAX_BODY = 1 << 20
_MOST_BUCKETS = 10_000


class Buckets:
    """A token bucket per key: `rate` requests a second, twice that at once. Belongs to the event loop."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._depth = max(2 * rate, 1.0)
        self._levels: dict[str, tuple[float, float]] = {}

    def take(self, key: str) -> float:
        """Take one: 0.0 when there was one, else the seconds until there is."""
        time_ = time.monotonic()
        level, at = self._levels.get(key, (self._depth, time_))
        level = min(level + (time_ - at) * self._rate, self._depth)
        wait_s = 0.0 if level >= 1 else (1 - level) / self._rate
        if len(self._levels) >= _MOST_BUCKETS and key not in self._levels:
            # Those that are full again by now are as good as new ones.
            age = self._depth / self._rate
            self._levels = {name: kept for name, kept in self._levels.items() if time_ - kept[1] < age}
        self._levels[key] = (level - 1 if not wait_s else level, time_)
        return wait_s


class Gate:
    """The middleware. The application's lifespan gives the application its `control` and `tokens`."""

    def __init__(self, app: ASGIApp, settings: Settings, buckets: Buckets) -> None:
        self._app = app
        self._buckets = buckets
        self._open_metrics = settings.is_local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope["app"].state
        path = scope["path"].rstrip("/") or "/"
        changes = scope["method"] not in SAFE and not _is_under(path, *ASKS)
        token = shown_token(scope)
        try:
            principal = await self._principal(state.tokens, scope, path, token)
        except (Unauthorized, TooManyRequests) as error:
            await _refusal(error)(scope, receive, send)
            return
        except OUTAGE as outage:
            await store_unavailable(outage)(scope, receive, send)
            return
        # What is open to all changes nothing, whatever the method.
        changes = changes and principal is not NOBODY
        try:
            _authorise(principal, path, changes)
        except Forbidden as error:
            # Someone who is known tried what is not allowed: the log is to have it.
            actor = _actor(scope, principal)
            actor.action = f"{scope['method']} {path}"
            await self._note(state.control, actor, error.status, error.code)
            await _refusal(error)(scope, receive, send)
            return
        shared: MutableMapping[str, Any] = scope.setdefault("state", {})
        shared["principal"], shared["actor"] = principal, None
        if not changes or _is_under(path, *LOOKS):
            await self._app(scope, receive, send)
        else:
            await self._changing(scope, receive, send, state.control, principal, path)
        if token is not None and state.tokens.take_stale(token):
            await self._note_use(state.tokens, principal)

    async def _principal(self, tokens: Tokens, scope: Scope, path: str, token: str | None) -> Principal:
        if path in PUBLIC or (path == METRICS and token is None and self._open_metrics):
            return NOBODY
        if token is None:
            raise Unauthorized(
                "token_missing",
                "the API asks for a token: send the header `Authorization: Bearer TOKEN`. On this machine it lies in "
                "the file admin-token of the data directory; `harli token create` makes more",
            )
        principal = tokens.remembered(token)
        if principal is None:
            # Those who guess are bounded before the store is asked for them.
            self._take(f"address {_address(scope)}")
            principal = await run_in_threadpool(tokens.principal, token)
        self._take(payer(principal))
        return principal

    def _take(self, key: str) -> None:
        wait_s = self._buckets.take(key)
        if wait_s:
            error = TooManyRequests(
                "rate_limited",
                f"more requests than one token may make; try again in {wait_s:.2f} s, or raise HARLI_REQUESTS_PER_S",
            )
            error.retry_after_s = wait_s
            raise error

    async def _changing(
        self, scope: Scope, receive: Receive, send: Send, control: Control, principal: Principal, path: str
    ) -> None:
        """A request that is to change something: its body is bounded, and what comes of it is written down."""
        actor = _actor(scope, principal)
        scope["state"]["actor"] = actor
        start: Message | None = None
        answered = False

        async def sending(message: Message) -> None:
            nonlocal start, answered
            if message["type"] == "http.response.start":
                start = message
                return
            if start is not None:
                # Whoever has the answer finds it in the log.
                if not actor.noted or start["status"] >= 400:
                    describe(actor, scope)
                    await self._note(control, actor, start["status"], _code(message.get("body", b"")))
                answered = True
                await send(start)
                start = None
            await send(message)

        bounded = receive if _is_under(path, *UPLOADS) else _Bounded(receive, scope)
        try:
            await self._app(scope, bounded, sending)
        except Exception:
            if not answered:
                describe(actor, scope)
                await self._note(control, actor, 500, None)
            raise

    @staticmethod
    async def _note(control: Control, actor: Actor, status: int, code: str | None) -> None:
        if status in (404, 405) and not actor.action:
            return  # there is no such route
        try:
            await run_in_threadpool(audit.note, control, actor, status, code)
        except OUTAGE as error:
            logger.error("%s by %s (%s) cannot be audited: %s", actor.action, actor.user, status, error)

    @staticmethod
    async def _note_use(tokens: Tokens, principal: Principal) -> None:
        try:
            await run_in_threadpool(tokens.note_use, principal)
        except OUTAGE as error:
            logger.warning("the use of a token cannot be noted: %s", error)


class _Bounded:
    """A request's `receive` that gives no more than MAX_BODY bytes. Raises HTTPException."""

    def __init__(self, receive: Receive, scope: Scope) -> None:
        self._receive = receive
        self._left = MAX_BODY
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        self._too_large = declared.isdigit() and int(declared) > MAX_BODY

    async def __call__(self) -> Message:
        if not self._too_large:
            message = await self._receive()
            self._left -= len(message.get("body", b""))
            if self._left >= 0:
                return message
        raise HTTPException(413, f"the body is larger than {MAX_BODY} bytes; send less")


def describe(actor: Actor, scope: Scope) -> None:
    """Fill in what the request does, once its route is known."""
    route = scope.get("route")
    if route is not None and not actor.action:
        # A route knows its path below the routers that it is in; their part has no parameters.
        steps = scope["path"].split("/")
        outer = steps[: len(steps) - route.path.count("/")]
        actor.action = f"{scope['method']} {'/'.join(outer)}{route.path}"
        actor.ref = "/".join(str(value) for value in scope.get("path_params", {}).values()) or None


def _authorise(principal: Principal, path: str, changes: bool) -> None:
    if _is_under(path, *_PLATFORM):
        principal.require_platform("viewer")
    if not changes:
        return
    area = next((area for prefix, area in _AREAS.items() if _is_under(path, prefix)), "admin")
    principal.require("admin" if area == "admin" else "operator", area)
    if area == "targets":
        principal.require_platform("operator")


def _is_under(path: str, *prefixes: str) -> bool:
    return f"{path}/".startswith(tuple(f"{prefix}/" for prefix in prefixes))


def payer(principal: Principal) -> str:
    """From whose bucket a request is taken."""
    return principal.token_id or principal.user


def _actor(scope: Scope, principal: Principal) -> Actor:
    return Actor(principal.tenant, principal.user, principal.token_id, _address(scope), "", None)


def _address(scope: Scope) -> str | None:
    client = scope.get("client")
    return str(client[0])[:64] if client else None


def shown_token(scope: Scope) -> str | None:
    """That of the header `Authorization`, if it has the form of one."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            kind, _, token = value.decode("latin-1").partition(" ")
            return token.strip() if kind.lower() == "bearer" and token.strip() else None
    return None


def _code(content: bytes) -> str | None:
    try:
        code = json.loads(content)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return None
    return str(code)[:80]


def _refusal(error: HarliError) -> Response:
    response = answer(error.status, error.code, error.message, error.param)
    if isinstance(error, Unauthorized):
        response.headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, TooManyRequests):
        response.headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    return response
