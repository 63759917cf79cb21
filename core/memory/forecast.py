"""What requests that have not come yet will take of the KV cache: from those that came lately. No clock, no I/O.

Arrivals are taken for a Poisson process of the rate seen in the last `WINDOW_S` seconds, each with the length of one of
those seen: λ arrivals of lengths L take λ·E[L] tokens in the mean, with a standard deviation of √(λ·E[L²]).
"""

from __future__ import annotations

from collections import deque
from math import ceil, sqrt

WINDOW_S = 10.0


class Arrivals:
    """Requests seen in the last `WINDOW_S` seconds; moments are in seconds and never go back."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int]] = deque()

    def see(self, now: float, prompt: int, most_new: int) -> None:
        """A request came with a prompt of `prompt` tokens, and may get `most_new` more."""
        self._seen.append((now, prompt, most_new))

    def tokens(self, now: float, horizon_s: float, steps: float) -> int:
        """KV tokens that arrivals of the next `horizon_s` seconds, `steps` decode steps, will hold at their end: the
        mean and one standard deviation."""
        while self._seen and self._seen[0][0] <= now - WINDOW_S:
            self._seen.popleft()
        if not self._seen:
            return 0
        lengths = [prompt + min(steps, most_new) for _, prompt, most_new in self._seen]
        share = horizon_s / WINDOW_S
        return ceil(share * sum(lengths) + sqrt(share * sum(length**2 for length in lengths)))
