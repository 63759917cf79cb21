"""What became of memory that the KV cache took from a job, moment by moment. Seconds of one monotonic clock."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from core.memory.share import Move


@dataclass(slots=True)
class Reclaim:
    """since: when the first request had to wait for memory, or the decision where none had; moves: what the job was
    told to do; tokens: of the KV pool that is to come of it; short: the first request that it was too small for, if
    there was one; grown_at, admitted_at: when the pool had that size, and when that request waited no more."""

    bytes: int
    since: float
    decided_at: float
    moves: Sequence[Move]
    tokens: int = 0
    short: Hashable | None = None
    grown_at: float | None = None
    admitted_at: float | None = None

    @property
    def free(self) -> bool:
        """The job's pages are back in the arena."""
        return all(move.query() for move in self.moves)

    @property
    def through(self) -> bool:
        """Nothing of it is yet to come."""
        return self.free and self.grown_at is not None and (self.short is None or self.admitted_at is not None)

    @property
    def ms(self) -> float:
        """Until the job's pages were back in the arena, which they are."""
        return self._after(self.moves[-1].over_at)

    def _after(self, moment: float | None) -> float:
        assert moment is not None
        return (moment - self.since) * 1e3

    def __str__(self) -> str:
        """For people, once it is through."""
        first, moved = self.moves[0], len(self.moves) > 1
        told = (
            f"{self.bytes / 2**20:.0f} MiB were free {self.ms:.1f} ms after a request first waited for them: decided "
            f"after {self._after(self.decided_at):.1f}, what the job had queued over after "
            f"{self._after(first.began_at):.1f}, "
            + (f"its activations free after {self._after(first.over_at):.1f}, " if moved else "")
            + f"in the KV cache after {self._after(self.grown_at):.1f}"
        )
        return told if self.short is None else f"{told}, the request ran after {self._after(self.admitted_at):.1f}"
