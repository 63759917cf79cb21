"""Takes the profile that the predictor is fitted to, on the engine itself and with the graphs that it serves with.

Tasklets are timed alone first, while nothing decodes. Then the engine sends itself batches of requests that are all of
one length (`Profiler.batches`), and while one decodes every layout has its turn for a few steps: alone, and with its
finetune part kept busy. Steps and tasklets are timed by the executor's own events, as they are when it serves.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from statistics import median
from typing import Any, NamedTuple, Protocol

from core.policy.types import WHOLE, Layout, StepPlan, TaskletKind
from core.predictor.measuring import batches_to_measure
from core.predictor.profile import Machine, MicroBatch, Point, Profile, TaskletPoint
from core.runtime.executor import NOTHING, Executor, Expectation, Expected, Ran, Size, Work

STEPS, SETTLE = 14, 4  # of each turn, and how many of them do not count: work of the turn before ends in them
_CHUNK = 8  # tasklets queued at once when they are timed alone
_COVER = 1.5  # of the expected step: what keeps a finetune part busy for certain
_LEAST_TAIL = 1.05  # p99 of so few tasklets


class Turn(NamedTuple):
    """A layout's turn: with its finetune part kept busy, or without finetuning."""

    layout: Layout
    beside: bool


class Endless(Work, Protocol):
    """Tasklets without end: micro-batch after micro-batch, `kinds` being those of one."""

    kinds: tuple[TaskletKind, ...]

    def upcoming(self, count: int) -> tuple[TaskletKind, ...]:
        """The next ones, up to the end of the micro-batch."""


def turns(layouts: Sequence[Layout]) -> list[Turn]:
    """In which order layouts have their turns; alone a confined one is the whole device."""
    found = []
    for layout in layouts:
        found += [Turn(layout, beside=False)] if layout.kind != "confined" else []
        found += [Turn(layout, beside=True)] if layout != WHOLE else []
    return found


class Profiler:
    """One profile in the making; belongs to the scheduler's thread.

    new_executor: makes one of its own, over the streams in `finetune`, given what a tasklet is expected to take; room:
    the longest that a request may become, and the KV tokens that a batch may hold at its end. batches: (requests,
    tokens of each) that the engine is to send itself, numbered from 0, and decode for `steps` steps; none when there is
    no room.
    """

    def __init__(
        self,
        new_executor: Callable[[Expectation], Executor],
        finetune: Mapping[Layout, Any],
        work: Endless,
        *,
        machine: Machine,
        micro_batch: MicroBatch,
        captured: Sequence[int],
        kv_heads: int,
        room: tuple[int, int],
    ) -> None:
        self._executor, self._finetune, self._work = new_executor(self), dict(finetune), work
        self._machine, self._micro_batch = machine, micro_batch
        self._captured, self._kv_heads = tuple(captured), kv_heads
        self._turns = turns(list(finetune))
        self.steps = len(self._turns) * STEPS + 1
        longest, kv_tokens = room[0] - self.steps, room[1] - self.steps * max(captured)
        self.batches = tuple(batches_to_measure(captured, longest, kv_tokens, machine.sms))
        self._alone_ms: dict[tuple[Layout, TaskletKind], float] = {}
        self._tasklets: list[TaskletPoint] = []
        self._measured: dict[tuple[int, Turn], list[tuple[Size, float]]] = defaultdict(list)
        self._ran: dict[tuple[int, Layout, TaskletKind], list[Ran]] = defaultdict(list)
        self._number = -1
        self._taken = 0  # steps of this batch
        self._launched: deque[tuple[int, Turn] | None] = deque()  # whose result is not in; None: does not count
        self._turn = Turn(WHOLE, beside=False)
        self._last_ms = 0.0

    def decode_ms(self, layout: Layout, size: Size, beside: TaskletKind | None) -> float:
        """The executor's `Expectation`: what the last step took."""
        return self._last_ms

    def tasklet_ms(self, layout: Layout, kind: TaskletKind, size: Size) -> Expected:
        """What they took alone, next to a step too: that is being measured."""
        ms = self._alone_ms.get((layout, kind), 1.0)
        return Expected(ms, ms)

    # ---- tasklets alone ----------------------------------------------------------------------------------------------

    def time_tasklets(self) -> None:
        """Time a micro-batch on every finetune part. Waits for the device; nothing may decode meanwhile."""
        by_stream: dict[int, dict[TaskletKind, list[float]]] = {}
        for layout, stream in self._finetune.items():
            if id(stream) not in by_stream:
                self._micro_batch_on(layout)  # the first one pays for cold caches
                by_stream[id(stream)] = self._micro_batch_on(layout)
            for kind, values in by_stream[id(stream)].items():
                self._alone_ms[layout, kind] = median(values)
                self._tasklets.append(TaskletPoint(layout=layout, kind=kind, ms=median(values), p99_ms=_tail(values)))

    def _micro_batch_on(self, layout: Layout) -> dict[TaskletKind, list[float]]:
        times: dict[TaskletKind, list[float]] = defaultdict(list)
        left = len(self._work.kinds)
        while left:
            left -= self._executor.idle(min(left, _CHUNK), self._work, layout)
            self._executor.drain()
            for one in self._executor.collect()[1]:
                times[one.kind].append(one.ms)
        return times

    # ---- step path ---------------------------------------------------------------------------------------------------

    def step_begins(self, number: int, requests: int, size: Size) -> None:
        """A decode step of batch `number` is about to be launched, with so many of its requests running."""
        if number != self._number:
            self.leave()
            self._number, self._taken = number, 0
        whole_batch = requests == self.batches[number][0]
        at = self._taken // STEPS
        if whole_batch and at < len(self._turns):
            self._turn = self._turns[at]
            counts = self._taken % STEPS >= SETTLE
            self._taken += 1
        else:
            self._turn, counts = Turn(WHOLE, beside=False), False
        self._launched.append((number, self._turn) if counts else None)
        self._executor.begin_step(self._turn.layout, size)

    def step_launched(self) -> None:
        """It is launched: keep the finetune part busy where it is the turn of that."""
        layout, beside = self._turn
        count = 0
        if beside:
            lacking = _COVER * self._last_ms - self._executor.beside_ms().mean
            for kind in self._work.upcoming(len(self._work.kinds)):
                if lacking <= 0:
                    break
                lacking -= self._alone_ms[layout, kind]
                count += 1
        self._executor.step_launched(StepPlan(layout, beside=count), self._work)

    def step_ended(self) -> None:
        """A result is in: take what the device has measured."""
        steps, ran = self._executor.collect()
        for step in steps:
            place = self._launched.popleft()
            self._last_ms = step.ms
            if place is not None:
                self._measured[place].append((Size(step.padded, step.kv_tokens, step.max_kv), step.ms))
        for one in ran:
            if one.padded and one.layout != WHOLE:
                self._ran[self._number, one.layout, one.kind].append(one)

    def other_batch(self) -> None:
        """The engine launched something that is no step of a measured batch."""
        self._executor.other_batch()

    def leave(self) -> None:
        """Back to the engine's own graphs with nothing queued. Waits for the device."""
        self._executor.drain()
        self.step_ended()
        self._executor.begin_step(WHOLE, NOTHING)
        self._executor.other_batch()

    # ---- result ------------------------------------------------------------------------------------------------------

    def profile(self) -> Profile:
        """What was measured. Raises ValueError when no step was that the whole device ran alone."""
        points = []
        for (_, (layout, beside)), found in self._measured.items():
            size = found[len(found) // 2][0]
            times = [ms for _, ms in found]
            points.append(
                Point(
                    layout=layout, batch=size.padded, kv_tokens=size.kv_tokens, max_kv=size.max_kv,
                    beside="mix" if beside else None, ms=median(times), p99_ms=max(times),
                )
            )  # fmt: skip
        tasklets = list(self._tasklets)
        for (_, layout, kind), ran in self._ran.items():
            times, one = [r.ms for r in ran], ran[len(ran) // 2]
            tasklets.append(
                TaskletPoint(
                    layout=layout, kind=kind, batch=one.padded, kv_tokens=one.kv_tokens, ms=median(times),
                    p99_ms=_tail(times),
                )
            )  # fmt: skip
        if not any(point.layout == WHOLE for point in points):
            raise ValueError(f"none of the {len(self.batches)} batches decoded as a whole")
        return Profile(
            machine=self._machine, captured=self._captured, kv_heads=self._kv_heads, points=tuple(points),
            tasklets=tuple(tasklets), micro_batch=self._micro_batch,
            measured=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, harli, at the engine's start",
        )  # fmt: skip


def _tail(times: list[float]) -> float:
    """p99 of a handful of tasklets: the second slowest of twenty, and not less than a little over the median."""
    return max(sorted(times)[int(len(times) * 0.95)], _LEAST_TAIL * median(times))
