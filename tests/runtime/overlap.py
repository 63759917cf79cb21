"""SGLang's overlap loop around the real runtime, executor and broker, on an arena, with a device that runs nothing but
the test's clock: requests come, are prefilled and decode; a job's tasklets take their time on a stream of their own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from core.link.messages import FromEngine, SetTargets, StartJob, Target, ToEngine
from core.link.transport import ControlEnd
from core.memory import _arena
from core.memory.broker import Marks
from core.memory.rows import Rows
from core.memory.share import JobShare, Move
from core.policy.types import WHOLE, TaskletKind
from core.runtime.executor import Executor
from core.runtime.memory import Broker
from core.runtime.runtime import Load, Prepared, Queued, Runtime
from tests.finetune import small
from tests.runtime import device
from tests.runtime.device import Event, Steady
from tests.runtime.kv_rows import KvRows
from tests.runtime.link import PromptEnd
from tests.runtime.test_runtime import HELLO

PAGE, ROW = 4096, 32  # tokens of 128 bytes in a page of each column
STEP_MS, TASKLET_MS = 8.0, 2.0


class Clock(device.Clock):
    """The share's thread waits for its moments, each of which is seen to have its effect before time goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.moments: list[Later] = []
        self.settle: Callable[[], None] = lambda: None

    def turn(self, until: float) -> None:
        for moment in sorted(self.moments, key=lambda one: one.at):
            if moment.at <= until:
                self.ms = max(self.ms, moment.at)
                self.moments.remove(moment)
                moment.passed.set()
                self.settle()
        self.ms = max(self.ms, until)


class Later:
    """A moment at which what a stream had queued is over."""

    def __init__(self, at: float) -> None:
        self.at, self.passed = at, threading.Event()

    def query(self) -> bool:
        return self.passed.is_set()

    def synchronize(self) -> None:
        assert self.passed.wait(20.0)


class Stream(device.Stream):
    """One that captured tasklets use."""

    def record_event(self) -> Later:
        moment = Later(max(self.until, self._clock.ms))
        assert isinstance(self._clock, Clock)
        self._clock.moments.append(moment)
        return moment

    def wait_event(self, event: Any) -> None:
        if isinstance(event, Event):
            super().wait_event(event)


class Launched:
    """A job of a captured slot, whose tasklets take their time on its stream, and when each is queued and over."""

    def __init__(self, job: Any, stream: Stream) -> None:
        self._job, self._stream = job, stream
        self.queued: list[tuple[float, float]] = []

    def launch(self, partition: int) -> TaskletKind | None:
        kind: TaskletKind | None = self._job.launch(partition)
        if kind is not None:
            self.queued.append((self._stream._clock.ms, self._stream.run(TASKLET_MS)[1]))
        return kind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._job, name)


@dataclass(eq=False)
class Request:
    prompt: int
    most_new: int
    at: float = 0.0  # when it comes, and from its queueing on when that was
    done: int = 0
    ran_at: float | None = None

    @property
    def need(self) -> int:
        return self.prompt + self.most_new

    @property
    def ahead(self) -> int:
        return self.most_new - self.done


@dataclass
class Kv(KvRows):
    """The KV pool of `Serving`, as the broker knows it."""

    rows: int
    columns: int
    waiting_queue: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.arena = _arena.memfd_arena(PAGE, self.columns * self.rows)
        self._rows = Rows(self.arena, "kv cache", [128] * self.columns, ROW * self.rows)
        self._rows.resize(self.rows)
        self.row_tokens = ROW
        self.size = self.most = self._rows.tokens - 1
        self._coming: list[tuple[int, Move | None]] = []

    @property
    def free(self) -> int:
        return self.size - sum(one.prompt + one.done for one in self.running)

    @property
    def goal(self) -> int:
        return self.slots_of(self._coming[-1][0]) if self._coming else self.size

    @property
    def waiting(self) -> int:
        return len(self.waiting_queue)

    def fewest(self) -> int:
        return max((one.need + 2 for one in (*self.running, *self.waiting_queue)), default=ROW - 1)

    def held_back(self) -> int:
        return sum(one.ahead for one in self.running)

    def asked(self) -> int:
        return self.held_back() + sum(one.need for one in self.waiting_queue) if self.waiting_queue else 0

    def short(self) -> tuple[Request, float] | None:
        left = self.free - self.held_back()
        for one in self.waiting_queue:
            left -= one.need
            if left < 0:
                return one, one.at / 1e3
        return None

    def waits(self, request: object) -> bool:
        return request in self.waiting_queue

    def arrived(self) -> Sequence[tuple[int, int]]:
        return ()

    def resize(self, tokens: int, after: Move | None = None) -> int:
        rows = self.rows_of(tokens)
        self._coming.append((rows, after))
        self.size = min(self.size, self.slots_of(rows))
        return self.slots_of(rows)

    def advance(self) -> None:
        """Between two batches."""
        while self._coming and (self._coming[0][1] is None or self._coming[0][1].query()):
            rows, _ = self._coming.pop(0)
            self._rows.resize(rows)
            self.size = self.slots_of(rows)


class Serving:
    """prepare: makes the job, over `stream`, with a share of `broker`. A prefill takes up to `chunk` tokens, and
    `prefill_ms` for each; to take up a request takes `receive_ms`."""

    def __init__(
        self, folder: Path, prepare: Callable[[Serving, StartJob], Any], *, rows: int, columns: int = 2,
        chunk: int = 64, prefill_ms: float = 2.0,
    ) -> None:  # fmt: skip
        url = f"ipc://{folder}/link.sock"
        self.control, self.link = ControlEnd(url), PromptEnd(url, HELLO.engine_id)
        self.folder, self.chunk, self.prefill_ms, self.receive_ms = folder, chunk, prefill_ms, 0.0
        self.clock = Clock()
        self.clock.ms = 100_000.0
        self.clock.settle = self._settle
        self.decode, self.stream = device.Stream("decode", self.clock), Stream("finetune", self.clock)
        self.kv = Kv(rows, columns)
        self.broker = Broker(self.kv, Marks(), clock=self.clock)
        self.share: JobShare | None = None
        self.job: Launched | None = None
        self.executor = Executor(
            self.decode, {WHOLE: self.stream}, select=lambda layout: None, new_event=lambda: Event(self.clock),
            expectation=Steady(STEP_MS, TASKLET_MS), clock=self.clock,
        )  # fmt: skip

        def prepared(order: StartJob) -> Launched:
            self.job = Launched(prepare(self, order), self.stream)
            return self.job

        self.runtime = Runtime(
            Prepared(
                hello=HELLO, device=torch.device("cpu"), prepare=prepared, memory=self.broker,
                queued=Queued(self.executor, {WHOLE: 0}, lambda batch: 4),
            ),
            self.link, policy="tasklet_slices", margin=0.0, calibration_prefix="calibration", clock=self.clock,
        )  # fmt: skip
        self.runtime.finish_calibration()
        self.received: list[FromEngine] = []
        self.coming: deque[Request] = deque()
        self.prefills: list[tuple[float, float, float]] = []  # launched, begins, ends
        self._results: deque[tuple[str, list[Request], float]] = deque()

    def new_share(self, slot: Any) -> JobShare:
        self.share = self.broker.slot_share(slot)
        return self.share

    def _settle(self) -> None:
        if self.share is not None:
            self.share.settle()

    def send(self, message: ToEngine) -> None:
        while not self.control.send(HELLO.engine_id, message):
            self.receive()
        self.link.await_message()

    def target(self, ms: float) -> None:
        self.send(SetTargets(version=1, targets=(Target(kind="itl", ms=ms),)))

    def start(self, **changes: object) -> None:
        self.send(StartJob(spec=small.spec(self.folder, **changes), token=1))

    def receive(self) -> None:
        while len(self.received) < self.link.sent:
            got = self.control.receive(10_000)
            assert got is not None
            self.received.append(got[1])

    def close(self) -> None:
        """The job is cancelled."""
        if self.runtime._job is not None:
            self.runtime._job.stop(save=False)
            self.runtime._job.poll()
        self.clock.turn(max(self.clock.ms, self.stream.until))
        self.runtime.close()
        self.control.close()

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """`event_loop_overlap`: requests are received, the next batch is made and launched, and the result of the one
        before is waited for."""
        self.receive()
        self._receive_requests()
        self.runtime.between_batches()  # as the plugin hooks them around `get_next_batch_to_run`
        self.kv.advance()
        taken = self._admitted()
        if taken:
            self._launch_prefill(taken)
        elif self.kv.running:
            self._launch_decode()
        if len(self._results) > (1 if taken or self.kv.running else 0):
            self._process()
        elif not self._results:
            self.runtime.idle(self._load())
            self.clock.turn(self.clock.ms + 0.5)

    def _receive_requests(self) -> None:
        for one in [one for one in self.coming if one.at <= self.clock.ms]:
            self.coming.remove(one)
            self.clock.turn(self.clock.ms + self.receive_ms)
            one.at = self.clock.ms
            self.kv.waiting_queue.append(one)
            self.runtime.request_came()

    def _admitted(self) -> list[Request]:
        kv, taken, tokens = self.kv, [], 0
        left = kv.free - kv.held_back()
        for one in kv.waiting_queue:
            left -= one.need
            if left < 0 or tokens + one.prompt > max(self.chunk, one.prompt):
                break
            tokens += one.prompt
            taken.append(one)
        kv.waiting_queue = kv.waiting_queue[len(taken) :]
        kv.running += taken
        return taken

    def _launch_prefill(self, taken: list[Request]) -> None:
        for one in taken:
            one.ran_at = self.clock.ms
        self.runtime.prefill_begins()
        begin, end = self.decode.run(self.prefill_ms * sum(one.prompt for one in taken))
        self.prefills.append((self.clock.ms, begin, end))
        self._results.append(("prefill", taken, end))

    def _launch_decode(self) -> None:
        running = list(self.kv.running)
        self.runtime.decode_begins(self._load())
        _, end = self.decode.run(STEP_MS)
        self.runtime.decode_launched()
        self._results.append(("decode", running, end))

    def _process(self) -> None:
        kind, requests, end = self._results.popleft()
        self.clock.turn(end)
        if kind == "prefill":
            self.runtime.prefill_ended([], self._load())
            return
        for one in requests:
            one.done += 1
        self.kv.running = [one for one in self.kv.running if one.ahead > 0]
        self.runtime.decode_ended([(f"{id(one)}", one.ahead <= 0) for one in requests], self._load())

    def _load(self) -> Load:
        kv = self.kv
        lengths = [one.prompt + one.done for one in kv.running]
        return Load(
            [str(id(one)) for one in kv.running], kv.waiting, sum(one.prompt for one in kv.waiting_queue), sum(lengths),
            max(lengths, default=0), kv.size - kv.free, kv.size,
        )  # fmt: skip

    def until(self, done: Callable[[], bool], turns: int = 20_000) -> None:
        for _ in range(turns):
            if done():
                return
            self.turn()
        raise AssertionError("it did not come to that")
