"""The running batch of a simulated engine: continuous batching, KV tokens, retraction. Costs nothing per request and
step: what changes with each step is kept as one number plus a constant per request."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

from core.workload.arrivals import Arrival


@dataclass(slots=True)
class Request:
    """A request on its way. emitted: answer tokens so far, as of `since`, the step at which it joined the batch;
    ends: the step after which it is done, -1 when it does not run."""

    number: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    emitted: int = 0
    since: int = 0
    ends: int = -1
    first_ms: float = inf
    last_ms: float = inf
    joined_ms: float = inf
    retractions: int = 0


class RunningBatch:
    """Requests in the order of their coming: waiting, running, finished. Times are ms since the start of the run."""

    def __init__(self, arrivals: Sequence[Arrival], target_ms: float) -> None:
        self.waiting: deque[Request] = deque()
        self.waiting_tokens = 0
        self.finished: list[Request] = []
        self.size = 0
        self.kv_tokens = 0
        self.step = 0
        self.retracted = 0
        self._target_ms = target_ms
        self._coming = iter(arrivals)
        self._next = next(self._coming, None)
        self.next_ms = inf if self._next is None else self._next.time_s * 1e3
        self.arrived = 0
        self._ends: dict[int, list[Request]] = {}
        self._joined: list[Request] = []
        self._longest: list[tuple[int, int, Request]] = []
        self._tightest: list[tuple[float, int, Request]] = []

    def arrive(self, now_ms: float, with_first_token: bool) -> None:
        """Move what came until now to the waiting requests; `with_first_token`: prefilled elsewhere."""
        while self.next_ms <= now_ms:
            came = self._next
            assert came is not None
            request = Request(self.arrived, came.time_s, came.input_tokens, came.output_tokens)
            self.arrived += 1
            if with_first_token:
                request.emitted = 1
            if with_first_token and request.output_tokens == 1:
                request.first_ms = request.last_ms = self.next_ms
                self.finished.append(request)
            else:
                self.waiting.append(request)
                self.waiting_tokens += request.input_tokens + request.emitted
            self._next = next(self._coming, None)
            self.next_ms = inf if self._next is None else self._next.time_s * 1e3

    def take(self) -> Request:
        """The first waiting request leaves the queue."""
        request = self.waiting.popleft()
        self.waiting_tokens -= request.input_tokens + request.emitted
        return request

    def join(self, request: Request, now_ms: float) -> None:
        """`request` (with at least its first token) decodes from the next step on, or is done."""
        if request.emitted >= request.output_tokens:
            self.finished.append(request)
            return
        request.since = self.step
        request.joined_ms = min(request.joined_ms, now_ms)
        request.first_ms = min(request.first_ms, now_ms)
        request.ends = self.step + request.output_tokens - request.emitted
        self._ends.setdefault(request.ends, []).append(request)
        self._joined.append(request)
        self.size += 1
        self.kv_tokens += request.input_tokens + request.emitted
        heappush(self._longest, (request.since - request.input_tokens - request.emitted, request.number, request))
        behind = request.first_ms + self._target_ms * (request.emitted - request.since)
        heappush(self._tightest, (behind, request.number, request))

    def stepped(self, now_ms: float) -> None:
        """A decode step has ended: each running request has one token more."""
        self.step += 1
        self.kv_tokens += self.size
        for request in self._ends.pop(self.step, ()):
            if request.ends == self.step:
                self.size -= 1
                self.kv_tokens -= request.input_tokens + request.output_tokens
                request.emitted, request.ends, request.last_ms = request.output_tokens, -1, now_ms
                self.finished.append(request)

    def retract(self) -> Request:
        """The request that joined last goes back to the head of the queue, its KV cache is dropped."""
        while (request := self._joined.pop()).ends < 0:
            pass
        request.emitted += self.step - request.since
        request.ends = -1
        request.retractions += 1
        self.size -= 1
        self.kv_tokens -= request.input_tokens + request.emitted
        self.waiting.appendleft(request)
        self.waiting_tokens += request.input_tokens + request.emitted
        self.retracted += 1
        return request

    def max_kv(self) -> int:
        """KV tokens of the longest running request."""
        heap = self._longest
        while heap and self._left(heap[0][2], self.step - heap[0][0]):
            heappop(heap)
        if len(heap) > 4 * self.size + 64:
            self._longest = [entry for entry in heap if not self._left(entry[2], self.step - entry[0])]
            heapify(self._longest)
        return self.step - self._longest[0][0] if self._longest else 0

    def slack_ms(self, now_ms: float) -> float:
        """What the next gap may take until the first running request exceeds the target by its mean gap so far."""
        heap = self._tightest
        while heap and self._moved(heap[0]):
            heappop(heap)
        if len(heap) > 4 * self.size + 64:
            self._tightest = heap = [entry for entry in heap if not self._moved(entry)]
            heapify(heap)
        return heap[0][0] + self._target_ms * self.step - now_ms if heap else inf

    def _left(self, request: Request, kv_tokens: int) -> bool:
        held = request.input_tokens + request.emitted + self.step - request.since
        return request.ends < 0 or held != kv_tokens

    def _moved(self, entry: tuple[float, int, Request]) -> bool:
        behind, _, request = entry
        return request.ends < 0 or request.first_ms + self._target_ms * (request.emitted - request.since) != behind
