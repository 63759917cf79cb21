"""The one error type that crosses a border: what is wrong, where, and what to do about it."""

from __future__ import annotations

import errno
import sqlite3
from typing import Any

_LONGEST = 8000  # characters; a message names at most some places


class HarliError(Exception):
    """A fault a caller can act on.

    ``code`` is a stable snake_case word for programs, ``message`` names place, value and remedy for people, ``param``
    is the field or file that is at fault (None when it is none in particular) and ``status`` the HTTP status. What they
    quote may come from anywhere, so that both are made of whole characters and bounded.
    """

    status = 400

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = _printable(message)
        self.param = _printable(param) if param is not None else None


def _printable(text: str) -> str:
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


class Invalid(HarliError):
    """The request is understood and cannot be carried out as it stands. `report` is what a validator found, where one
    looked (a `core.api.schemas.DatasetReport`)."""

    status = 422
    report: Any = None


class NotFound(HarliError):
    """The thing named does not exist."""

    status = 404


class Conflict(HarliError):
    """The thing named is in a state (or at a version, or of a name) that forbids the request."""

    status = 409


class Unavailable(HarliError):
    """A part that is needed (the engine, say) is not there now; trying again later may help."""

    status = 503


class Unauthorized(HarliError):
    """The request shows no token, or one that is not (or no longer) taken."""

    status = 401


class Forbidden(HarliError):
    """The request comes from a place that may not make it (a page of another origin, say), or from someone who may
    not."""

    status = 403


class TooLarge(HarliError):
    """The body is larger than the limit that the message names."""

    status = 413


class TooManyRequests(HarliError):
    """More requests than one token may make; trying again helps after `retry_after_s` seconds."""

    status = 429
    retry_after_s: float = 1.0


_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_POSTGRESQL = "53100"


def full_disk(error: BaseException) -> Unavailable | None:
    """What an error that a full disk (or a user's quota of it) made is for a caller; None for any other."""
    if _is_full_store(getattr(error, "orig", None)):
        return Unavailable(
            "disk_full", "the disk that the store is on is full, and nothing was changed; free some of it and try again"
        )
    number = error.errno if isinstance(error, OSError) else None
    # safetensors, and a copied folder's errors, tell the system's number in words alone.
    said = str(error)
    if number not in _FULL and not any(f"(os error {full})" in said or f"[Errno {full}]" in said for full in _FULL):
        return None
    return Unavailable(
        "disk_full",
        "the disk of the API's data directory is full, and nothing was stored; free some of it, or delete data sets "
        "and adapters that are not needed, and try again",
    )


def _is_full_store(cause: object) -> bool:
    """Whether that is what SQLite's or PostgreSQL's driver says."""
    full = getattr(cause, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    return full or getattr(cause, "sqlstate", None) == _FULL_POSTGRESQL
