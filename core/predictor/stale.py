"""When predictions stop being trusted, and when they are again."""

from __future__ import annotations

from collections import deque


class MissWatch:
    """`reason` turns non-empty at `misses` missed bounds within `steps` steps and empty after `clean` steps in a row
    that held. Something other than a miss (a clock change, a new shape) is told by `distrust`."""

    __slots__ = ("_clean", "_held", "_limit", "_recent", "_sum", "reason")

    def __init__(self, misses: int = 4, steps: int = 20, clean: int = 20) -> None:
        self._limit = misses
        self._recent: deque[bool] = deque([False] * steps, maxlen=steps)
        self._sum = 0
        self._clean = clean
        self._held = 0
        self.reason = ""

    def see(self, missed: bool) -> bool:
        """Count one step; True when this one made the predictions stale."""
        self._sum += missed - self._recent[0]
        self._recent.append(missed)
        if self.reason:
            self._held = 0 if missed else self._held + 1
            if self._held >= self._clean:
                self.reason = ""
            return False
        if self._sum >= self._limit:
            self.distrust(f"{self._sum} of the last {len(self._recent)} steps outlasted their bound")
            return True
        return False

    def distrust(self, reason: str) -> None:
        """Stale from now on because of `reason`."""
        self.reason = reason
        self._held = 0
        self._recent.extend([False] * len(self._recent))
        self._sum = 0
