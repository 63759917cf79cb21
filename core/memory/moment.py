"""Moments of what is queued: on a device, or in a thread."""

from __future__ import annotations

from typing import Protocol


class Moment(Protocol):
    """When what was queued is over: `torch.cuda.Event`."""

    def synchronize(self) -> None:
        """Wait for it."""


class Mark(Moment, Protocol):
    """One that can be asked."""

    def query(self) -> bool:
        """It has passed."""


class Passed:
    """A moment that has passed: of a device that does everything at once."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass
