"""A device that runs nothing: streams and events on a clock that the test turns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

from core.policy.types import Layout, TaskletKind
from core.runtime.executor import Executor, Expected, Size


class Clock:
    """Milliseconds; calling it gives seconds."""

    def __init__(self) -> None:
        self.ms = 0.0

    def __call__(self) -> float:
        return self.ms / 1e3


class Stream:
    """Work runs in order; `until` is when what was queued is over."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.name, self._clock, self.until = name, clock, 0.0

    def run(self, ms: float) -> tuple[float, float]:
        """Queue work; answers when it begins and ends."""
        begin = max(self.until, self._clock.ms)
        self.until = begin + ms
        return begin, self.until

    def wait_event(self, event: Event) -> None:
        self.until = max(self.until, event.at)


class Event:
    """When everything that was queued before it was recorded is over. Waiting on the host is what no step may do."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self.at = clock, 0.0

    def record(self, stream: Stream) -> None:
        self.at = max(stream.until, self._clock.ms)

    def query(self) -> bool:
        return self.at <= self._clock.ms + 1e-9

    def synchronize(self) -> None:
        self._clock.ms = max(self._clock.ms, self.at)

    def elapsed_time(self, end_event: Event) -> float:
        return end_event.at - self.at


class Job:
    """Tasklets that take `ms` on each layout, and when each ran."""

    def __init__(self, streams: dict[Layout, Stream], ms: dict[Layout, float], count: int = 10_000) -> None:
        self._streams, self.ms, self.left = streams, ms, count
        self.ran: list[tuple[Layout, float, float]] = []
        self.fail_at: int | None = None

    def on(self, layout: Layout) -> nullcontext[None]:
        return nullcontext()

    def launch(self, layout: Layout) -> TaskletKind | None:
        if self.fail_at == len(self.ran):
            raise RuntimeError("out of memory")
        if not self.left:
            return None
        self.left -= 1
        self.ran.append((layout, *self._streams[layout].run(self.ms[layout])))
        return "forward"


class Steady(NamedTuple):
    """Expects every step, and every tasklet, to take the same."""

    step_ms: float
    each_ms: float

    def decode_ms(self, layout: Layout, size: Size, beside: TaskletKind | None) -> float:
        return self.step_ms

    def tasklet_ms(self, layout: Layout, kind: TaskletKind, size: Size) -> Expected:
        return Expected(self.each_ms, self.each_ms)


class Engine:
    """Decode on a fake device in SGLang's order: with `overlap`, a step is launched when the last but one is over."""

    def __init__(self, layouts: Sequence[Layout], decode_ms: float, tasklet_ms: dict[Layout, float], **bound: float):
        self.clock = Clock()
        self.decode = Stream("decode", self.clock)
        parts: dict[int, Stream] = {}
        self.finetune = {
            layout: parts.setdefault(layout.finetune_sms, Stream(f"finetune {layout.finetune_sms}", self.clock))
            for layout in layouts
        }
        self._tasklet_ms = tasklet_ms
        self.expected_ms = decode_ms
        self.slower = 1.0  # how many times as long tasklets are expected to take next to a step
        self.scatter = 1.0  # their bound, as many times that
        self.selected: list[Layout] = []
        self.steps: list[tuple[Layout, float, float]] = []
        self.job = Job(self.finetune, tasklet_ms)
        self.events = 0  # that were made
        self.executor = Executor(
            self.decode,
            self.finetune,
            select=self.selected.append,
            new_event=self._new_event,
            expectation=self,
            clock=self.clock,
            **bound,
        )

    def _new_event(self) -> Event:
        self.events += 1
        return Event(self.clock)

    def decode_ms(self, layout: Layout, size: Size, beside: TaskletKind | None) -> float:
        return self.expected_ms

    def tasklet_ms(self, layout: Layout, kind: TaskletKind, size: Size) -> Expected:
        mean = self._tasklet_ms[layout] * (self.slower if size.padded else 1.0)
        return Expected(mean, mean * self.scatter)

    def launch_decode(self, layout: Layout) -> None:
        """What the engine does between `begin_step` and `step_launched`."""
        self.steps.append((layout, *self.decode.run(self.expected_ms)))
