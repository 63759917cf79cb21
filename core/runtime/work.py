"""What an optimizer step of the running job is made of."""

from __future__ import annotations

from collections import Counter

from core.policy.types import TaskletKind


class Work:
    """Counts tasklets; the figures are of whole optimizer steps, so what comes after the last one does not count."""

    def __init__(self) -> None:
        self.steps = 0
        self._open: Counter[str] = Counter()
        self._open_tokens = 0.0
        self._closed: Counter[str] = Counter()
        self._tokens = 0.0

    def ran(self, kind: TaskletKind, tokens: float) -> None:
        """A tasklet was run that counts for so many tokens."""
        self._open[kind] += 1
        self._open_tokens += tokens
        if kind == "optimizer":
            self.steps += 1
            self._closed += self._open
            self._tokens += self._open_tokens
            self._open.clear()
            self._open_tokens = 0.0

    @property
    def mix(self) -> dict[str, float]:
        """Tasklets of each kind in a step; empty before the first one."""
        return {kind: count / self.steps for kind, count in self._closed.items()}

    @property
    def step_tokens(self) -> float:
        """Tokens that a step trains on."""
        return self._tokens / max(self.steps, 1)
