"""The guard: finetuning stands still when decode misses its target, whatever the policy says; and how that is told."""

from __future__ import annotations

from typing import Literal, NamedTuple

from core.predictor.stale import MissWatch

_MISSES, _STEPS, _CLEAN = 4, 20, 40
# Pauses with less than this between them are told as one.
_QUIET_S = 5.0


class News(NamedTuple):
    """Something to tell people."""

    level: Literal["info", "warning"]
    code: Literal["guard", "guard_lifted"]
    text: str


class Guard:
    """Acts at four gaps over the tightest ITL target within twenty steps and lets go after forty in a row that held.

    A predictor that no longer trusts itself makes every policy pause; that is told in the same way. Moments are seconds
    of one monotonic clock, passed in.
    """

    def __init__(self) -> None:
        self._watch = MissWatch(misses=_MISSES, steps=_STEPS, clean=_CLEAN)
        self._limit_ms = 0.0
        self._stale = ""
        self._since: float | None = None
        # Since the last report: how often it acted, how long finetuning stood still.
        self._pauses = 0
        self._held_s = 0.0
        # The episode that people were told of: its pauses, their seconds, when it was last seen to act.
        self._episode: tuple[int, float, float] | None = None

    @property
    def reason(self) -> str:
        """Why finetuning has to stand still; empty when it need not."""
        return f"gaps over {self._limit_ms:g} ms: {self._watch.reason}" if self._watch.reason else ""

    def see(self, now: float, gap_ms: float | None, limit_ms: float | None, stale: str) -> None:
        """A decode step's result is in: its longest gap without a prefill in it, the tightest ITL target that applied
        (None: there was none), and why the predictor does not trust itself."""
        if gap_ms is not None and limit_ms is not None and self._watch.see(gap_ms > limit_ms):
            self._limit_ms = limit_ms
        self._stale = stale
        acts = bool(self._watch.reason or stale)
        if acts and self._since is None:
            self._since = now
            self._pauses += 1
        elif not acts and self._since is not None:
            self._held_s += now - self._since
            self._since = None

    def take(self, now: float) -> tuple[int, float]:
        """Pauses that began since the last call, and the seconds that finetuning stood still."""
        if self._since is not None:
            self._held_s += now - self._since
            self._since = now
        taken = self._pauses, self._held_s
        self._pauses, self._held_s = 0, 0.0
        return taken

    def news(self, now: float, pauses: int, held_s: float, *, job: bool) -> News | None:
        """What to tell, given what `take` gave: that it acts, once an episode, and that the episode is over. Without a
        job there is nothing that stands still."""
        acts = self._since is not None
        if self._episode is not None:
            count, seconds, last = self._episode
            self._episode = count + pauses, seconds + held_s, now if acts or pauses else last
            if now - self._episode[2] < _QUIET_S:
                return None
            count, seconds, _ = self._episode
            self._episode = None
            times = "once" if count == 1 else f"{count} times"
            return News("info", "guard_lifted", f"finetuning goes on: it stood still {times}, {seconds:.1f} s in all")
        if job and (acts or pauses):
            self._episode = max(pauses, 1), held_s, now
            why = self.reason or self._stale or f"{_MISSES} gaps in {_STEPS} steps over {self._limit_ms:g} ms"
            return News("warning", "guard", f"finetuning paused: {why}")
        return None
