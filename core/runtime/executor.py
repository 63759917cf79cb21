"""Launches what a step's plan says on a device that works asynchronously: nothing here waits for the device.

Per decode step: the layout's decode graphs are selected before the engine launches its batch; behind the launch,
`beside` tasklets go to the layout's finetune stream and may start when the step starts, and `after` tasklets go to the
whole device's stream, start when step and tasklets before them are done, and hold the decode stream until they are.
All order between streams is by events. Tasklets of a job form one chain whatever streams they run on.

The executor works in overlap order too: step n + 1 is launched before the result of step n is known, so what it tells
of queued work (`inflight_ms`, `beside_ms`) is what will be left when the next step can start. There the `after` of a
step is put off until the engine is about to launch something else (`catch_up`), which is in time: the device has the
step itself to go on with. Memory that is taken from the job then waits for one step's tasklets and not for two's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal, NamedTuple, Protocol

from core.policy.types import WHOLE, Layout, StepPlan, TaskletKind

BOUND_MS = 60.0
_EARLY = 2  # steps after something else than decode, whose time says little


class Event(Protocol):
    """A moment on a stream: `torch.cuda.Event` with timing. Recorded again it is that later moment; what was to wait
    for the one before still does."""

    def record(self, stream: Any) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any) -> float:
        """ms from this moment to `end_event`, both having passed."""


class Work(Protocol):
    """Where tasklets come from: a job, on whichever partition it is told."""

    def on(self, layout: Layout) -> AbstractContextManager[None]:
        """What `launch` is called within, as often as it is for one layout in a row."""

    def launch(self, layout: Layout) -> TaskletKind | None:
        """Queue the next tasklet on the layout's finetune stream; None when there is none (any more)."""


class Expected(NamedTuple):
    """ms that something takes on average, and at most."""

    mean: float
    bound: float


NO_TIME = Expected(0.0, 0.0)


class Expectation(Protocol):
    """What steps and tasklets are expected to take."""

    def decode_ms(self, layout: Layout, size: Size, beside: TaskletKind | None) -> float:
        """A decode step of that size on average, alone or next to a tasklet of the kind."""

    def tasklet_ms(self, layout: Layout, kind: TaskletKind, size: Size) -> Expected:
        """A tasklet there next to a decode step of that size, or without decode (`NOTHING`)."""


class Step(NamedTuple):
    """A finished decode step: its ms from the moment at which the device was free for it, the kind of a tasklet that
    ran beside it, the first that was queued with it or the last of those from before, and whether it was one of the
    first two after something else than decode. The device may have waited for the launch of these: the engine made up
    a new batch for the first, and before it launched the second it handed out what a prefill gave."""

    layout: Layout
    padded: int
    kv_tokens: int
    max_kv: int
    beside: TaskletKind | None
    ms: float
    early: bool


class Ran(NamedTuple):
    """A finished tasklet: its ms, and the decode step that it was launched next to (batch 0: none)."""

    layout: Layout
    kind: TaskletKind
    padded: int
    kv_tokens: int
    ms: float


class Size(NamedTuple):
    """A decode batch: requests padded to the captured graph, tokens in their KV cache, the longest of them."""

    padded: int
    kv_tokens: int
    max_kv: int


NOTHING = Size(0, 0, 0)


class _Moment:
    """What an event was recorded for. Once nobody holds the moment any more, the event is unused, to be recorded again:
    making one takes longer than that."""

    __slots__ = ("_unused", "event")

    def __init__(self, event: Event, unused: list[Event]) -> None:
        self.event, self._unused = event, unused

    def __del__(self) -> None:
        self._unused.append(self.event)


@dataclass(slots=True)
class _Tasklet:
    layout: Layout
    kind: TaskletKind
    size: Size
    begin: _Moment
    end: _Moment
    alone: Expected  # without decode
    beside: Expected  # next to the decode step that it was queued with
    step: int  # how many decode steps had been launched when it was queued


@dataclass(slots=True)
class _Step:
    layout: Layout
    size: Size
    begin: _Moment
    end: _Moment
    early: bool
    beside: TaskletKind | None = None
    rest: _Tasklet | None = None  # the last tasklet on its finetune part before any was queued with the step
    expected_ms: float = 0.0


class Executor:
    """One engine's decode stream and the finetune streams of its partitions. Single-threaded.

    finetune: the stream of each layout; select: makes the engine use a layout's decode graphs from the next launch on;
    new_event: makes an event with timing; bound_ms: the most finetune work that may be queued beside decode, and behind
    each step, in expected ms (one tasklet may always be); clock: monotonic seconds.
    """

    def __init__(
        self,
        decode_stream: Any,
        finetune: Mapping[Layout, Any],
        *,
        select: Callable[[Layout], None],
        new_event: Callable[[], Event],
        expectation: Expectation,
        bound_ms: float = BOUND_MS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._decode = decode_stream
        self._finetune = dict(finetune)
        self._select = select
        self._new_event = new_event
        self._expectation = expectation
        self._bound_ms = bound_ms
        self._clock = clock
        self.layout = WHOLE
        self._unused: list[Event] = []
        self._free: _Moment | None = None  # the last moment on the decode stream, from which the next step counts
        self._early = _EARLY  # of the next steps
        self._step: _Step | None = None  # being launched
        self._behind: tuple[Work, int, _Moment] | None = None  # tasklets put off, and the end of the step before them
        self._steps: deque[_Step] = deque()
        self._launched = 0  # steps, in all
        self._tasklets: deque[_Tasklet] = deque()
        self._last: _Tasklet | None = None  # the end of the chain, finished or not
        self._counted = (0, 0)  # tasklets queued beside and behind steps since `take_counts`
        self._stepped = 0.0  # when a step, or what holds one, was last seen to finish
        self._progressed = 0.0  # when the first tasklet in the queue began, as far as it has been seen

    # ---- what is queued ----------------------------------------------------------------------------------------------

    def inflight_ms(self) -> float:
        """Expected ms of whole-device tasklets between the last launched step and the next. What is behind an earlier
        step holds up the one after that, and is no part of the next one's gap."""
        return self._queued(lambda tasklet: tasklet.layout == WHOLE and tasklet.step == self._launched)

    def beside_ms(self) -> Expected:
        """ms of work that will still run on the finetune part when the next step can start, without decode beside it:
        until then it goes on next to what is launched, which takes it longer."""
        if not self._tasklets:
            return NO_TIME
        now = self._clock()
        decode, ran = self._decode_ms(now), (now - self._progressed) * 1e3
        return Expected(self._beside(0, decode, ran), self._beside(1, decode, ran))

    def _beside(self, which: Literal[0, 1], decode: float, ran: float) -> float:
        """Of `beside_ms` the mean or the bound. decode: ms until the next step can start; ran: ms for which the first
        tasklet has run."""
        left = 0.0
        for tasklet in self._tasklets:
            if tasklet.layout == WHOLE:  # decode waits for it, and what comes behind it does
                decode -= max(0.0, tasklet.alone.mean - ran)
            else:
                beside = tasklet.beside[which]
                to_go = max(0.0, beside - ran)
                until = min(max(0.0, decode), to_go)
                decode -= until
                left += tasklet.alone[which] * (to_go - until) / beside
            ran = 0.0
        return left

    def _decode_ms(self, now: float) -> float:
        """ms until the launched steps, and what holds the next one, are expected to be over."""
        steps = sum([step.expected_ms for step in self._steps])
        holding = sum([tasklet.alone.mean for tasklet in self._tasklets if tasklet.layout == WHOLE])
        return max(0.0, steps + holding - (now - self._stepped) * 1e3)

    def queued_ms(self) -> float:
        """Expected ms of all finetune work that has not finished."""
        return self._queued(lambda _: True)

    def _queued(self, which: Callable[[_Tasklet], bool]) -> float:
        left = 0.0
        for n, tasklet in enumerate(self._tasklets):
            if which(tasklet):
                ms = tasklet.alone.bound
                if n == 0:  # it may have run since the last one ended
                    ms = max(0.0, ms - (self._clock() - self._progressed) * 1e3)
                left += ms
        return left

    # ---- launching ---------------------------------------------------------------------------------------------------

    def begin_step(self, layout: Layout, size: Size) -> None:
        """The engine is about to launch a decode batch: its graphs are those of `layout`. Work that still runs on
        another layout's finetune part ends first."""
        self.catch_up()
        if layout != self.layout:
            if self._tasklets and self._tasklets[-1].layout != WHOLE:
                self._decode.wait_event(self._tasklets[-1].end.event)
                self._free = None
            self._select(layout)
            self.layout = layout
        begin = self._free
        if begin is None:
            begin = self._recorded(self._decode)
        self._step = _Step(layout, size, begin, begin, self._early > 0)
        self._early = max(0, self._early - 1)

    def step_launched(self, plan: StepPlan, work: Work | None) -> None:
        """The batch is launched: queue what the plan puts beside and behind it, or less when the bound is reached or
        there is no more work. What comes behind it is put off where that is in time.

        Whatever `work` raises passes through; the step itself is then accounted for.
        """
        step, self._step = self._step, None
        assert step is not None
        step.end = self._free = self._recorded(self._decode)
        self._goes_on()
        self._steps.append(step)
        self._launched += 1
        if step.layout != WHOLE and self._tasklets and self._tasklets[-1].layout == step.layout:
            step.rest = self._tasklets[-1]
        beside = 0
        if work is not None and plan.beside and step.layout != WHOLE:
            # What is behind the steps before has a bound of its own, and with overlap two of them have yet to run.
            queued = self._queued(lambda tasklet: tasklet.layout != WHOLE)
            beside = self._queue(work, step.layout, plan.beside, step.begin, step.size, queued)
            if beside:
                step.beside = self._tasklets[-beside].kind
                self._count(beside=beside)
        next_to = step.beside or (step.rest.kind if step.rest is not None else None)
        expected = self._expectation.decode_ms(step.layout, step.size, next_to)
        step.expected_ms = expected if isfinite(expected) else 0.0
        if work is not None and plan.after and beside == (plan.beside if step.layout != WHOLE else 0):
            self._behind = work, plan.after, step.end
            if len(self._steps) == 1 or self._steps[-2].end.event.query():  # without overlap, or the engine is late
                self.catch_up()

    def catch_up(self) -> None:
        """Queue what was put off: before the engine's next launch is planned."""
        if self._behind is None:
            return
        (work, count, end), self._behind = self._behind, None
        # What the step before has behind it is over by then, and no reason to leave this one's slack unused.
        queued = self._queue(work, WHOLE, count, end, NOTHING, queued=0.0)
        self._hold(queued)
        self._count(behind=queued)

    def take_counts(self) -> tuple[int, int]:
        """How many tasklets were queued beside and behind decode steps since the last call, whoever had them queued."""
        counted, self._counted = self._counted, (0, 0)
        return counted

    def _count(self, beside: int = 0, behind: int = 0) -> None:
        self._counted = self._counted[0] + beside, self._counted[1] + behind

    def other_batch(self) -> None:
        """The engine launched something that is no decode step (prefill): the next step counts from its own launch."""
        self.catch_up()
        self._free = None
        self._early = _EARLY
        self._step = None

    def finetuning_first(self) -> None:
        """What the engine launches next waits for all finetune work that is queued."""
        if self._tasklets:
            self._decode.wait_event(self._tasklets[-1].end.event)
            self._free = None

    def idle(self, count: int, work: Work, layout: Layout = WHOLE) -> int:
        """Nothing decodes: queue up to `count` tasklets on the whole device, or alone on a layout's finetune part."""
        self.catch_up()
        queued = self._queue(work, layout, count, None, NOTHING)
        self._hold(queued)
        return queued

    def _queue(
        self, work: Work, layout: Layout, count: int, start: _Moment | None, size: Size, queued: float | None = None
    ) -> int:
        """Queue tasklets on a layout's stream, the first not before `start` and the end of the chain. queued: expected
        ms that count against the bound already, all that has not finished unless it is given."""
        queued = self.queued_ms() if queued is None else queued
        if self._tasklets and queued >= self._bound_ms:
            return 0  # and the stream has nothing to wait for: what is taken from the job waits for its stream
        stream = self._finetune[layout]
        last = self._last
        waited = start is not None
        if start is not None:
            stream.wait_event(start.event)
        if last is not None and self._finetune[last.layout] is not stream:
            stream.wait_event(last.end.event)
            waited = True
        fresh = waited or last is None or not self._tasklets
        begin = self._recorded(stream) if fresh or last is None else last.end
        if not self._tasklets:
            self._progressed = self._clock()
        if layout == WHOLE:
            self._goes_on()
        launched, known = 0, None
        with work.on(layout):
            while launched < count and (not self._tasklets or queued < self._bound_ms):
                kind = work.launch(layout)
                if kind is None:
                    break
                if kind != known:
                    known, (alone, beside) = kind, self._expected(layout, kind, size)
                end = self._recorded(stream)
                self._last = _Tasklet(layout, kind, size, begin, end, alone, beside, self._launched)
                self._tasklets.append(self._last)
                begin = end
                queued += alone.bound
                launched += 1
        return launched

    def _hold(self, tasklets: int) -> None:
        """The decode stream waits for the whole-device tasklets that were just queued."""
        if tasklets:
            assert self._last is not None
            self._decode.wait_event(self._last.end.event)
            self._free = self._last.end

    def _expected(self, layout: Layout, kind: TaskletKind, size: Size) -> tuple[Expected, Expected]:
        """A tasklet alone, and next to the step; what nobody can tell, at the bound of all that is queued."""
        alone = self._bounded(layout, kind, NOTHING)
        if size == NOTHING:
            return alone, alone
        return alone, Expected(*map(max, alone, self._bounded(layout, kind, size)))

    def _bounded(self, layout: Layout, kind: TaskletKind, size: Size) -> Expected:
        mean, bound = self._expectation.tasklet_ms(layout, kind, size)
        return Expected(min(mean, self._bound_ms), min(bound, self._bound_ms))

    def _goes_on(self) -> None:
        """Something is about to be put on the decode stream, or to hold it: from now on, when nothing else does."""
        if not self._steps and all(tasklet.layout != WHOLE for tasklet in self._tasklets):
            self._stepped = self._clock()

    def _recorded(self, stream: Any) -> _Moment:
        event = self._unused.pop() if self._unused else self._new_event()
        event.record(stream)
        return _Moment(event, self._unused)

    # ---- results -----------------------------------------------------------------------------------------------------

    def collect(self) -> tuple[list[Step], list[Ran]]:
        """What has finished since the last call, in order."""
        steps, ran, last = [], [], None
        while self._steps and self._steps[0].end.event.query():
            last = self._steps.popleft()
            beside = last.beside or _still_ran(last)
            ms = last.begin.event.elapsed_time(last.end.event)
            steps.append(Step(last.layout, *last.size, beside, ms, last.early))
        while self._tasklets and self._tasklets[0].end.event.query():
            tasklet = self._tasklets.popleft()
            ms = tasklet.begin.event.elapsed_time(tasklet.end.event)
            ran.append(Ran(tasklet.layout, tasklet.kind, tasklet.size.padded, tasklet.size.kv_tokens, ms))
        now = self._clock()
        if steps or any(one.layout == WHOLE for one in ran):
            self._stepped = now
        if last is not None:
            self._progressed = now - self._running_ms(last) / 1e3
        elif ran:
            self._progressed = now
        return steps, ran

    def _running_ms(self, step: _Step) -> float:
        """For how long the first tasklet had run when a step ended that has just been seen to."""
        if not self._tasklets or not self._tasklets[0].begin.event.query():
            return 0.0
        return max(0.0, self._tasklets[0].begin.event.elapsed_time(step.end.event))

    def drain(self) -> None:
        """Wait until no finetune work is queued. Not for the step path: for the end of a job and of the engine."""
        if self._tasklets:
            self._tasklets[-1].end.event.synchronize()


def _still_ran(step: _Step) -> TaskletKind | None:
    """The kind of a tasklet from before that ran next to a finished step, which is no step alone then."""
    rest = step.rest
    if rest is None or (rest.end.event.query() and step.begin.event.elapsed_time(rest.end.event) <= 0):
        return None
    return rest.kind
