"""Every error that leaves the API: ``{"error": {"code", "message", "param"}}``, whoever raised it."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from sqlalchemy.exc import DataError, IntegrityError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from core.api import methods, openai_errors
from core.api.description import answered
from core.api.schemas import ErrorBody, ErrorDetail
from core.errors import HarliError, Invalid, full_disk
from db.store import OUTAGE

logger = logging.getLogger(__name__)

# For the routes' OpenAPI: the same body for each status that any of them answers with.
RESPONSES: dict[int | str, dict[str, Any]] = {
    status: answered(ErrorBody, text)
    for status, text in {
        400: "The body ends too early, or is not text in UTF-8",
        401: "No token, or one that is not (or no longer) taken",
        403: "The token may not do this, or the request comes from a page of another origin",
        404: "The thing named does not exist",
        409: "The thing named is in a state, at a version, or of a name that forbids the request",
        413: "The upload is larger than the limit",
        422: "The request, or the file in it, cannot be used as it is",
        429: "More requests than one token may make; `Retry-After` says when to try again",
        503: "A part that is needed (store, engine) is not there now",
    }.items()
}
_SHOWN = 3
_METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")


def answer(
    status: int,
    code: str,
    message: str,
    param: str | None = None,
    report: Any = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    body = ErrorBody(error=ErrorDetail(code=code, message=message, param=param), report=report)
    return JSONResponse(body.model_dump(mode="json", exclude={"report"} if report is None else None), status, headers)


def install(app: FastAPI) -> None:
    """Answer every exception of the routes as an error body."""

    @app.exception_handler(HarliError)
    async def _harli(_request: Request, error: HarliError) -> JSONResponse:
        report = error.report if isinstance(error, Invalid) else None
        return answer(error.status, error.code, error.message, error.param, report)

    @app.exception_handler(RequestValidationError)
    async def _validation(request: Request, error: RequestValidationError) -> JSONResponse:
        param, message = explain(error.errors(), _body_model(request))
        return answer(422, "invalid_request", message, param)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        what = f"{request.method} {request.url.path}"
        if error.status_code == 404:
            return answer(404, "route_not_found", f"there is nothing at {what}; /api/docs lists what there is")
        if error.status_code == 405:
            message = f"{what} does not exist; /api/docs lists what there is"
            return answer(405, "method_not_allowed", message, headers={"Allow": _methods(request)})
        if error.status_code == 413:
            return answer(413, "body_too_large", f"{what}: {error.detail}", "body")
        return answer(error.status_code, "http_error", f"{what}: {error.detail}")

    @app.exception_handler(ClientDisconnect)
    async def _gone(_request: Request, _error: ClientDisconnect) -> JSONResponse:
        return answer(400, "client_gone", "the connection ended in the middle of the body; send it again")

    @app.exception_handler(DataError)
    async def _value(_request: Request, error: DataError) -> JSONResponse:
        return answer(422, "value", f"a value of the request cannot be stored or looked for: {error.orig}")

    @app.exception_handler(IntegrityError)
    async def _taken(_request: Request, error: IntegrityError) -> JSONResponse:
        # Two asked for the same thing at once, or the name is one that the caller cannot see.
        logger.warning("refused by the store: %s", error.orig)
        return answer(409, "taken", "something of that name or id is there already; give another, or try again")

    async def _store(_request: Request, error: Exception) -> JSONResponse:
        return store_unavailable(error)

    for outage in OUTAGE:
        app.add_exception_handler(outage, _store)

    @app.exception_handler(OSError)
    async def _disk(_request: Request, error: OSError) -> JSONResponse:
        full = full_disk(error)
        if full is None:
            raise error
        logger.error("the disk is full: %s", error)
        return answer(full.status, full.code, full.message)

    @app.exception_handler(Exception)
    async def _fault(request: Request, error: Exception) -> JSONResponse:
        what = f"{request.method} {request.url.path}"
        message = f"{what} met a fault ({type(error).__name__}); the API's log has the details"
        if request.url.path.startswith(openai_errors.PREFIX):
            # Starlette answers a fault outside of all middleware, the one that translates the other errors among them.
            return JSONResponse(openai_errors.body(500, "internal", message).model_dump(), 500)
        return answer(500, "internal", message)


def _methods(request: Request) -> str:
    """What there is at the path of a request; a route of FastAPI's knows its own method only."""

    def is_there(method: str) -> bool:
        scope = {**request.scope, "method": method}
        return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)

    return ", ".join(filter(is_there, _METHODS))


def store_unavailable(error: Exception) -> JSONResponse:
    logger.error("the store failed: %s", error)
    if (full := full_disk(error)) is not None:
        return answer(full.status, full.code, full.message)
    reason = getattr(error, "orig", None) or error
    return answer(503, "store_unavailable", f"the store does not answer ({reason}); try again in a moment")


def _body_model(request: Request) -> Any:
    field = getattr(request.scope.get("route"), "body_field", None)
    return field.field_info.annotation if field is not None else None


def explain(errors: Sequence[Any], model: Any = None) -> tuple[str, str]:
    """(path of the first field at fault, what is wrong with the first few and what to do), of pydantic's errors.

    `model` is the body's, for the names that a misspelt field might have meant.
    """
    # A misspelt field explains the one that is missing.
    errors = sorted(errors, key=lambda error: error["type"] != "extra_forbidden")
    paths = ["body" if error["type"] == "json_invalid" else _path(error["loc"]) for error in errors]
    shown = [_sentence(path, error, model) for path, error in zip(paths, errors, strict=True)][:_SHOWN]
    if len(errors) > _SHOWN:
        shown.append(f"and {len(errors) - _SHOWN} more")
    return paths[0], "; ".join(shown)


def _path(loc: Sequence[str | int]) -> str:
    """Without the word that tells body from query."""
    inner = loc[1:] if loc and loc[0] in ("body", "query", "path", "header") else loc
    return _written(".".join(str(part) for part in inner)) or "body"


def _written(text: str) -> str:
    """With halves of surrogate pairs, which no answer can hold, spelt out."""
    return text.encode("utf-8", "backslashreplace").decode()


def _sentence(path: str, error: Any, model: Any) -> str:
    kind, value = error["type"], error.get("input")
    if kind == "missing":
        return f"{path} is missing; give it"
    if kind == "extra_forbidden":
        known = _fields(model, error["loc"][1:-1])
        close = difflib.get_close_matches(str(error["loc"][-1]), known, 1)
        hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(known)}" if known else "leave it out"
        return f"{path} is not a field of this request; {hint}"
    if kind == "json_invalid":
        return f"the body is not JSON: {error.get('ctx', {}).get('error', error['msg'])}"
    shown = f'"{value}"' if isinstance(value, str) else str(value)
    shown = _written(shown)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    if kind == "string_pattern_mismatch":
        return (
            f"{path} is {shown}; use lower-case letters, digits, dots, dashes and underscores, beginning with a letter "
            "or digit, at most 63"
        )
    message = error["msg"]
    if kind == methods.CODE:
        return f"{path}.{message}"
    for opening in ("Input should", "String should", "List should", "Value should"):
        message = message.replace(opening, "it should")
    return f"{path} is {shown}; {message[:1].lower()}{message[1:]}"


def _fields(model: Any, loc: Sequence[str | int]) -> list[str]:
    """The field names of the model at a place inside `model`."""
    for part in loc:
        if isinstance(part, int):
            model = next(iter(get_args(model)), None)
        elif isinstance(model, type) and issubclass(model, BaseModel) and part in model.model_fields:
            model = model.model_fields[part].annotation
        else:
            return []
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []
