"""The clock on the wall, on whose moment no test is to depend."""

from __future__ import annotations

from datetime import UTC, datetime


def far_off() -> str:
    """A cron line for a moment that is months away, whenever the tests run."""
    return f"0 2 1 {(datetime.now(UTC).month + 5) % 12 + 1} *"
