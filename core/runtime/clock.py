"""Latency of decode as requests see it, from the moments at which steps end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Request:
    first: float
    last: float
    tokens: int
    prefills: int


@dataclass(slots=True)
class Latencies:
    """What ended since it was last taken; ms. itl, stalls: (gap, requests that saw it), told apart by whether a prefill
    was launched or ran inside the gap. ttft, tpot: one value a request. by_tenant: those of `itl` that a tenant's
    requests saw."""

    itl: list[tuple[float, int]] = field(default_factory=list)
    stalls: list[tuple[float, int]] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    by_tenant: dict[str, list[tuple[float, int]]] = field(default_factory=dict)


class StepClock:
    """Follows every running request. Moments are seconds of one monotonic clock, passed in."""

    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}
        self._prefills = 0
        self._taken = Latencies()

    def prefill_begins(self) -> None:
        """A prefill step is about to be launched. With an overlap scheduler the decode step before it still runs, and
        its tokens wait while thousands of kernels are launched one by one: that gap has the prefill in it too."""
        self._prefills += 1

    def prefill(self, now: float, first_tokens: Iterable[tuple[str, float]]) -> None:
        """A prefill step ended; `first_tokens` are (request, when it came in) of those that got their first token."""
        self._prefills += 1
        for rid, received in first_tokens:
            self._taken.ttft.append((now - received) * 1e3)
            self._requests[rid] = _Request(now, now, 1, self._prefills)

    def decode(
        self, now: float, requests: Sequence[tuple[str, bool]], tenants: Mapping[str, str] | None = None
    ) -> float | None:
        """A decode step ended and gave each of `requests`, (request, whether that was its last), one token. tenants: of
        those requests whose gaps are to be told apart.

        Returns the longest gap in ms that has no prefill in it, None when every gap has one.
        """
        gaps: dict[float, int] = {}
        stalls: dict[float, int] = {}
        own: dict[tuple[str, float], int] = {}
        for rid, finished in requests:
            request = self._requests.get(rid)
            if request is None:  # its first token came from another server (disaggregated prefill)
                self._requests[rid] = request = _Request(now, now, 1, self._prefills)
            else:
                gap = (now - request.last) * 1e3
                seen = gaps if request.prefills == self._prefills else stalls
                seen[gap] = seen.get(gap, 0) + 1
                if tenants and seen is gaps and rid in tenants:
                    at = tenants[rid], gap
                    own[at] = own.get(at, 0) + 1
                request.last, request.prefills = now, self._prefills
                request.tokens += 1
            if finished:
                self.end(rid)
        self._taken.itl += gaps.items()
        self._taken.stalls += stalls.items()
        for (tenant, gap), count in own.items():
            self._taken.by_tenant.setdefault(tenant, []).append((gap, count))
        return max(gaps, default=None)

    def end(self, rid: str) -> None:
        """The request gets no more tokens."""
        request = self._requests.pop(rid, None)
        if request is not None and request.tokens > 1:
            self._taken.tpot.append((request.last - request.first) * 1e3 / (request.tokens - 1))

    def keep(self, running: Iterable[str]) -> None:
        """Forget requests that are not among `running` (aborted ones never report their end)."""
        alive = set(running)
        for rid in [rid for rid in self._requests if rid not in alive]:
            del self._requests[rid]

    def tpot_slack_ms(self, target_ms: float, rids: Iterable[str], now: float) -> float:
        """The ms that the next step may take with no request's mean time per token over `target_ms` after it; a step
        gets at most four times the target, however much a request has saved."""
        slack = 4.0 * target_ms
        for rid in rids:
            request = self._requests.get(rid)
            if request is not None:
                slack = min(slack, target_ms * request.tokens - (now - request.first) * 1e3)
        return slack

    def take(self) -> Latencies:
        """What ended since the last call."""
        taken, self._taken = self._taken, Latencies()
        return taken
