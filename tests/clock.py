"""The clock on the wall, on whose moment no test is to depend, and which is set at times."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, tzinfo
from types import ModuleType

import pytest

Set = Callable[[timedelta], None]


def far_off() -> str:
    """A cron line for a moment that is months away, whenever the tests run."""
    return f"0 2 1 {(datetime.now(UTC).month + 5) % 12 + 1} *"


def wall(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> Set:
    """Sets the clock that these modules read by `datetime.now`, forward or back from the true one; the monotonic clock
    goes on as it does."""
    ahead = timedelta()

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + ahead

    def put(by: timedelta) -> None:
        nonlocal ahead
        ahead = by

    for module in modules:
        monkeypatch.setattr(module, "datetime", Clock)
    return put
