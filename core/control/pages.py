"""Cursors of listings: opaque to callers, the key of the last row inside."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import TypeVar

from core.errors import Invalid

K = TypeVar("K", int, str)


def cursor(key: int | str) -> str:
    return base64.urlsafe_b64encode(str(key).encode()).decode().rstrip("=")


def key(cursor: str | None, kind: Callable[[str], K]) -> K | None:
    """The key in a cursor; raises Invalid for one that no listing gave out."""
    if cursor is None:
        return None
    try:
        found = kind(base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode())
        if isinstance(found, int) and not 0 <= found < 2**31:
            raise ValueError(f"{found} is no row")
        return found
    except (ValueError, binascii.Error) as error:
        raise Invalid(
            "cursor", f"the cursor {cursor!r} is not one of this listing; take `next` of its last page", "cursor"
        ) from error
