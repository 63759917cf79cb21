"""Calls as steps without I/O: a call is a generator that yields requests and is sent their responses.

`Client` and `AsyncClient` carry the requests; neither knows what a call is for, so each call is written once.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Concatenate, Generic, ParamSpec, TypeVar, overload
from uuid import uuid4

import httpx
from pydantic import TypeAdapter, ValidationError

from core.api import schemas
from core.client.rows import Rows
from core.errors import (
    Conflict,
    Forbidden,
    HarliError,
    Invalid,
    NotFound,
    TooLarge,
    TooManyRequests,
    Unauthorized,
    Unavailable,
)

if TYPE_CHECKING:
    from core.client.asynchronous import AsyncClient
    from core.client.synchronous import Client

P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M")
LIMITS = httpx.Limits(max_connections=100, keepalive_expiry=30)


@dataclass(frozen=True)
class Request:
    """One exchange with the API.

    It is made `after_s` seconds from now. A body that comes with a status below 400 is written to `into`, where that
    is given, and not kept. `read_timeout_s` replaces the client's time-out for answers that take their time.
    """

    method: str
    path: str
    params: dict[str, Any] = field(default_factory=dict)
    json: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    files: dict[str, Any] | None = None
    read_timeout_s: float | None = None
    after_s: float = 0.0
    into: BinaryIO | None = None

    def arguments(self, timeout_s: float) -> dict[str, Any]:
        """For `build_request` of httpx's clients."""
        return {
            "method": self.method,
            "url": self.path,
            "params": self.params,
            "json": self.json,
            "headers": self.headers,
            "files": self.files,
            "timeout": httpx.Timeout(timeout_s, read=self.read_timeout_s or timeout_s),
        }


Steps = Generator[Request, httpx.Response, T]


def exchange(method: str, path: str, **fields: Any) -> Steps[httpx.Response]:
    """One request; raises the HarliError that an error response stands for."""
    response = yield Request(method, path, **fields)
    raise_for(response)
    return response


def ask(answer: type[T], method: str, path: str, **fields: Any) -> Steps[T]:
    """One request and the body that answers it."""
    response = yield from exchange(method, path, **fields)
    return _adapter(answer).validate_json(response.content)


def ask_rows(row: type[M], path: str, **fields: Any) -> Steps[Rows[M]]:
    """One GET whose answer is a list."""
    found = yield from ask(list[row], "GET", path, **fields)  # type: ignore[valid-type]
    return Rows(found)


def download(path: str, destination: Path, params: dict[str, Any] | None = None) -> Steps[Path]:
    """Write the body of a GET to `destination` (a file, or a folder to put it in), whole or not at all."""
    folder = destination if destination.is_dir() else destination.parent
    if not folder.is_dir():
        raise Invalid("no_folder", f"there is no folder {folder}; make it, or name another", "destination")
    part = folder / f".{uuid4().hex}.part"
    try:
        with part.open("wb") as file:
            response = yield from exchange("GET", path, params=params or {}, into=file)
        if destination.is_dir():
            named = re.search(r'filename="([^"/\\]+)"', response.headers.get("content-disposition", ""))
            destination = destination / (named.group(1) if named else path.split("/")[-2])
        part.replace(destination)
    finally:
        part.unlink(missing_ok=True)
    return destination


_adapters: dict[Any, TypeAdapter[Any]] = {}


def _adapter(answer: type[T]) -> TypeAdapter[T]:
    """Building one takes longer than reading an answer."""
    if answer not in _adapters:
        _adapters[answer] = TypeAdapter(answer)
    return _adapters[answer]


class call(Generic[P, T]):
    """A method of both clients, of a function that describes its steps.

    On a `Client` it returns what the steps return, on an `AsyncClient` an awaitable of that.
    """

    def __init__(self, describe: Callable[Concatenate[Any, P], Steps[T]]) -> None:
        self._describe = describe

    @overload
    def __get__(self, client: None, owner: type) -> Callable[Concatenate[Any, P], Steps[T]]: ...

    @overload
    def __get__(self, client: Client, owner: type) -> Callable[P, T]: ...

    @overload
    def __get__(self, client: AsyncClient, owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...

    def __get__(self, client: Client | AsyncClient | None, owner: type) -> Any:
        describe = self._describe
        if client is None:
            return describe

        @functools.wraps(describe)
        def method(*args: P.args, **kwargs: P.kwargs) -> Any:
            return client.run(describe(client, *args, **kwargs))

        # For `help` and a notebook's `?`: without the client, and with what the caller gets.
        steps = inspect.signature(describe)
        method.__signature__ = steps.replace(  # type: ignore[attr-defined]
            parameters=list(steps.parameters.values())[1:],
            return_annotation=str(steps.return_annotation).removeprefix("Steps[").removesuffix("]"),
        )
        return method


# ---- errors ----------------------------------------------------------------------------------------------------------

_ERRORS: dict[int, type[HarliError]] = {
    error.status: error
    for error in (
        HarliError,
        Unauthorized,
        Forbidden,
        NotFound,
        Conflict,
        TooLarge,
        Invalid,
        TooManyRequests,
        Unavailable,
    )
}


# What proxies say in pages of their own.
_OF_A_PROXY = {
    413: "it takes smaller bodies only; raise its limit (nginx: client_max_body_size)",
    502: "it does not reach the API; is that running?",
    504: "it did not wait long enough for the API; raise its time-out (nginx: proxy_read_timeout)",
}


def raise_for(response: httpx.Response) -> None:
    """Raise the HarliError that an error response stands for."""
    if response.status_code < 400:
        return
    try:
        body = schemas.ErrorBody.model_validate_json(response.content)
    except ValidationError:
        message = f"{response.url} answered {response.status_code}, not as Harli's API does: {response.text[:200]}"
        if (hint := _OF_A_PROXY.get(response.status_code)) is not None:
            message = f"{message}; a proxy in between may have: {hint}"
        body = schemas.ErrorBody(error=schemas.ErrorDetail(code="not_harli", message=message))
    raise failure(response.status_code, body.error, body.report)


def failure(status: int, detail: schemas.ErrorDetail, report: schemas.DatasetReport | None) -> HarliError:
    """The error that the API answered with a status, or that an operation ended with."""
    error = _ERRORS.get(status, HarliError)(detail.code, detail.message, detail.param)
    error.status = status
    if isinstance(error, Invalid):
        error.report = report
    return error


def unreachable(base_url: str, error: httpx.HTTPError) -> Unavailable:
    return Unavailable(
        "api_unreachable",
        f"Harli's API does not answer at {base_url}: {reason(error)}; start it with `harli up`, or give the "
        "address of a running one (HARLI_HOST, HARLI_API_PORT)",
        "base_url",
    )


def reason(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__


def plain(value: Any) -> Any:
    """What JSON can hold of `value`: of a model, the fields that were set."""
    return value.model_dump(mode="json", exclude_unset=True) if hasattr(value, "model_dump") else value
