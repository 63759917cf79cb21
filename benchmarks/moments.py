"""When an engine's batches were through, for the program that watches it: a file that both map."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

_MOST = 2_000_000


class Moments:
    """A file of (monotonic seconds, requests of the decode batch, 0 for another batch), readable while it grows."""

    def __init__(self, path: Path, *, new: bool = False) -> None:
        if new:
            with path.open("wb") as file:
                file.truncate((_MOST + 1) * 16)
        self._rows = np.memmap(path, np.float64, "r+", shape=(_MOST + 1, 2))

    def add(self, requests: int) -> None:
        """Note that a batch's result is through, now. What is beyond the file's end is dropped."""
        count = int(self._rows[0, 0])
        if count < _MOST:
            self._rows[count + 1] = time.perf_counter(), requests
            self._rows[0, 0] = count + 1

    def gaps_ms(self, since: float, requests: int, skip: int) -> np.ndarray:
        """Between two decode results that follow each other, both of a batch of so many, after `since`, without the
        first `skip`."""
        rows = np.array(self._rows[1 : int(self._rows[0, 0]) + 1])
        rows = rows[rows[:, 0] >= since]
        both = (rows[1:, 1] == requests) & (rows[:-1, 1] == requests)
        return (np.diff(rows[:, 0])[both] * 1e3)[skip:]
