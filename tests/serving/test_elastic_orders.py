"""Memory under any order of events: SGLang's pool classes in its overlap loop, the elastic KV cache, the broker, and a
job in a captured slot or one whose activations are metered. Requests come and go, decisions fall at any moment, what is
told to threads is late or refused, and jobs begin, pause, fail and are cancelled meanwhile."""

from __future__ import annotations

import importlib.util
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from core.finetune.metered import MeteredTrainer
from core.finetune.trainer import Trainer
from core.link.messages import JobUpdate
from core.memory import arena as arena_module
from core.memory.broker import Decision
from core.memory.rows import Rows
from core.memory.share import Move
from core.memory.swap import Swappable
from core.runtime.job import JobRun
from core.runtime.memory import Broker
from tests.finetune import small
from tests.finetune.cpu_slot import CpuSlot, on_a_cpu
from tests.serving.overlap_pool import Loop, Request

__all__ = ["on_a_cpu"]

PAGE = 4096
SLOTS = 511  # 64 rows of 8 tokens, each of 4 pages
STEPS = 6
LOOKS = 2000  # until everything has to have come to rest
EVERY_S = 0.03


AWAITED: list[Move] = []  # by threads, now


def synchronize(move: Move) -> None:
    """`Move.synchronize`, which tells of itself."""
    AWAITED.append(move)
    move._over.wait()
    AWAITED.remove(move)


class Gate:
    """Where a thread stands until it is let through."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.held = 0
        self._lock = threading.Lock()

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    def synchronize(self) -> None:
        with self._lock:
            self.held += 1
        assert self._open.wait(60.0)
        with self._lock:
            self.held -= 1


class Stream:
    """Of a device whose queue is over when its gate opens."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def record_event(self) -> Gate:
        return self._gate

    def wait_event(self, event: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...


class Paced:
    """A rate that stops at a gate between two windows."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def wait_s(self, done: int, elapsed_s: float) -> float:
        self._gate.synchronize()
        return 0.0


class Orders(RuleBasedStateMachine):
    elastic: ModuleType
    folder: Path
    losses: dict[str, list[float]]
    sources: dict[str, Any]
    hasty = False  # goes on without waiting for what threads can do

    def __init__(self) -> None:
        super().__init__()
        self.loop = Loop(self.elastic, SLOTS)
        self.kv = self.loop.kv
        self.now = 1000.0
        self.broker = Broker(self.kv, clock=lambda: self.now)
        # The device's queue, a window that is copied, rows that are mapped or unmapped.
        self.gates = {name: Gate() for name in ("device", "window", "rows")}
        rows = self.kv._rows

        def resize(count: int) -> None:
            self.gates["rows"].synchronize()
            Rows.resize(rows, count)

        rows.resize = resize  # type: ignore[method-assign]
        self.arena = self.kv.arena
        self.claim = self.arena.claim("somebody else", 0)
        self.slot: CpuSlot | None = None
        self.job: JobRun | None = None
        self.kind = ""
        self.told: list[JobUpdate] = []
        self.updates: list[JobUpdate] = []
        self.numbers = iter(range(10**9))
        self.submitted: list[Request] = []
        self.resume: str | None = None
        self.shares: list[Any] = []

    # ---- requests ----------------------------------------------------------------------------------------------------

    @rule(prompt=st.integers(1, 200), shared=st.integers(0, 60), ahead=st.integers(1, 40), branch=st.integers(0, 2))
    def request(self, prompt: int, shared: int, ahead: int, branch: int) -> None:
        number = next(self.numbers)
        fresh = [(number * 7 + at) % 11 for at in range(max(0, prompt - shared))]
        tokens = array("q", [branch, *range(min(shared, prompt)), *fresh])
        one = Request(f"{number}", tokens, ahead)
        self.submitted.append(one)
        self.loop.waiting.append(one)
        self.poll()
        self.broker.request_came(step_ms=lambda: 10.0, restart=self.restart)
        self.loop.check()

    @rule(turns=st.integers(1, 12))
    def serve(self, turns: int) -> None:
        for _ in range(turns):
            self.turn()

    def turn(self) -> bool:
        """As the plugin hooks the loop, and the runtime what it is told."""
        self.between_batches()
        launched = self.loop.turn()
        self.broker.batch_made()
        self.after_step()
        return launched

    def between_batches(self) -> None:
        if self.broker.waited_for:
            self.look()
        self.kv.advance()
        self.quiet()
        self.loop.check()

    def after_step(self) -> None:
        if self.loop.waiting and not self.loop.holders():
            return  # neither a step nor idle: nobody tells the runtime
        self.look()
        self.loop.check()

    def look(self) -> None:
        self.poll()
        self.broker.look(step_ms=lambda: 10.0, restart=self.restart)
        self.quiet()

    @rule(seconds=st.sampled_from([0.001, 0.03, 0.5, 4.0]))
    def time_goes_on(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.loop.waiting or self.loop.holders())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from([*self.loop.waiting, *self.loop.holders()]))
        self.loop.abort(one)

    @precondition(lambda self: self.loop.idle)
    @rule()
    def flush(self) -> None:
        self.loop.flush()

    # ---- decisions ---------------------------------------------------------------------------------------------------

    @rule()
    def decide(self) -> None:
        self.look()

    @rule(rows=st.integers(0, 64))
    def resize(self, rows: int) -> None:
        """Without regard to what there is."""
        self.kv.resize(rows * 8)

    @rule(rows=st.integers(1, 64), swap=st.booleans())
    def take(self, rows: int, swap: bool) -> None:
        """A decision for the KV cache, whatever the marks say."""
        had = self.kv.rows_of(self.kv.goal)
        self.poll()
        self.broker._carry_out(
            Decision(max(rows, had), drop_activations=True, swap_out=swap, reason="a test"), self.restart
        )

    @rule(rows=st.integers(1, 64))
    def give(self, rows: int) -> None:
        """A decision for the job, whatever the marks say."""
        self.poll()
        had = self.kv.rows_of(self.kv.goal)
        wanted = self.broker._finetune_view().wanted
        grant = wanted if 0 < wanted <= self.broker._spare() else 0
        self.broker._carry_out(Decision(had if grant else min(rows, had), grant=grant, reason="a test"), self.restart)

    @rule(pages=st.integers(0, 64))
    def somebody_else(self, pages: int) -> None:
        """What is there is less than what was counted on."""
        said = self.arena.statistics()
        self.claim.resize(min(pages, self.claim.pages + said.capacity - said.used))

    # ---- threads -----------------------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(["device", "window", "rows"]))
    def hold(self, name: str) -> None:
        self.gates[name].shut()

    @rule(name=st.sampled_from(["device", "window", "rows"]))
    def let_go(self, name: str) -> None:
        self.gates[name].open()
        self.quiet()

    def quiet(self) -> None:
        """Every thread has gone as far as it goes: so that what comes next does not depend on chance."""
        if self.hasty:
            return
        deadline = time.monotonic() + 5.0
        while not self._stands() and time.monotonic() < deadline:
            time.sleep(0.0001)
        assert self._stands()

    def _stands(self) -> bool:
        if any(gate.held and gate.is_open for gate in self.gates.values()):
            return False  # it is about to go on
        device, window, rows = (self.gates[name].held for name in ("device", "window", "rows"))
        if sum(one.moving for one in self.shares) > device + window:
            return False
        job, mapping = self.job, self.kv._mapping
        at_work = int(mapping is not None and not mapping.done())
        if job is not None:
            at_work += int(job._preparing is not None and not job._preparing.done())
            at_work += int(any(not future.done() for future, _ in job._writing))
        return at_work <= rows + sum(not move.query() for move in list(AWAITED))

    # ---- jobs --------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.job is None)
    @rule(kind=st.sampled_from(["slot", "metered"]))
    def start(self, kind: str) -> None:
        if self.resume is not None and kind != self.kind:
            self.resume = None
        self.begin(kind)

    def begin(self, kind: str) -> None:
        number = next(self.numbers)
        spec = small.spec(self.folder / f"{number}", max_steps=STEPS, checkpoint_every=100)
        resume = Path(self.resume) if self.resume is not None else None
        self.kind, self.updates, self.saved = kind, [], False
        updates = self.updates
        if kind == "slot":
            if self.slot is None:
                self.slot = CpuSlot(self.sources["slot"], self.folder / "slot", self.arena)
                self.slot.streams = (Stream(self.gates["device"]),)  # type: ignore[assignment]
            slot = self.slot

            def slot_share() -> Any:
                return self._seen(self.broker.slot_share(slot.memory))  # type: ignore[arg-type]

            slot._new_share = slot_share  # type: ignore[method-assign]

            def prepare() -> Any:
                return slot.job(spec, resume)

        else:
            model = self.sources["metered"]

            def new_share(state: Any) -> Any:
                made, activations = self.broker.share("1", state, model.parameters())
                return self._seen(made), activations

            def prepare() -> Any:
                return MeteredTrainer(
                    model, spec, small.rows(), base_name="small", resume_from=resume, new_share=new_share
                )

        self.job = JobRun("engine", spec, 1, prepare, updates.append)
        self.quiet()

    def _seen(self, share: Any) -> Any:
        share._rate = Paced(self.gates["window"])
        self.shares.append(share)
        return share

    def poll(self) -> None:
        """As the runtime between two steps."""
        if self.job is None:
            return
        self.job.poll()
        if self.job.ended:
            last = self.updates[-1]
            losses = [one.loss for one in self.updates if one.loss is not None]
            began = next((one.step for one in self.updates if one.kind == "started"), 0) or 0
            if last.kind != "failed" or last.code != "internal":
                assert losses == self.losses[self.kind][began : began + len(losses)]
            assert last.kind in ("succeeded", "paused", "cancelled", "interrupted") or "a test" in (last.message or "")
            if last.kind == "succeeded" and not self.saved:
                assert began + len(losses) == STEPS
            self.resume = last.path if last.kind == "paused" else None
            self.job = None

    def restart(self) -> Any:
        return self.job.start_again() if self.job is not None else None

    @precondition(lambda self: self.job is not None)
    @rule(count=st.integers(1, 30))
    def train(self, count: int) -> None:
        self.poll()
        for _ in range(count):
            if self.job is None or self.broker.waiting is not None:
                return
            view = self.job.view()
            if view is None or not view.tasklets:
                return
            if (self.job.run_next() if self.kind == "metered" else self.job.launch(0)) is None:
                return

    @precondition(lambda self: self.job is not None)
    @rule(how=st.sampled_from(["pause", "save", "cancel", "fail", "interrupt"]))
    def leave(self, how: str) -> None:
        job = self.job
        assert job is not None
        if how == "pause":
            job.pause()
        elif how == "interrupt":
            if job._trainer is not None:  # else the process ends before there is one
                job.interrupt()
        elif how == "fail":
            if job._trainer is not None:
                job._fail(RuntimeError("a test"))
        else:
            job.stop(save=how == "save")
            self.saved |= how == "save"
        self.poll()

    # ---- always ------------------------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_lost(self) -> None:
        self.quiet()
        self.loop.check()
        said = self.arena.statistics()
        assert said.used == sum(one.pages for one in said.owners) <= said.capacity and said.lost == 0
        resting = all(not one.moving for one in self.shares) and self.kv._mapping is None
        if resting:
            held = sum({id(one.state): one.held for one in self.shares}.values())
            rows = self.kv._rows
            assert said.used == rows.pages_of(rows.rows) + held + self.claim.pages

    def teardown(self) -> None:
        """All of it comes to rest within so many looks, every request is answered, and everything is given back."""
        try:
            for gate in self.gates.values():
                gate.open()
            self.claim.resize(0)
            if self.job is not None and self.job._trainer is None:
                self.job.stop(save=False)
            for _ in range(LOOKS):
                self.now += EVERY_S
                launched = self.turn()
                if self.job is not None:
                    self.train(20)
                if self.loop.idle and self.job is None and not launched and self.at_rest():
                    break
                time.sleep(0.0005 if self.hasty else 0.0)
            assert self.loop.idle, f"{len(self.loop.waiting)} wait, {len(self.loop.running)} run"
            assert self.job is None and self.at_rest()
            for one in self.submitted:
                assert one.ended and (one.aborted or one.ahead == 0)
            said = self.arena.statistics()
            assert said.used == said.capacity == sum(one.pages for one in said.owners if one.name == "kv cache")
        finally:
            for gate in self.gates.values():
                gate.open()
            if self.job is not None and not self.job.ended:
                self.job.stop(save=False)
                for _ in range(1000):
                    if self.job.ended:
                        break
                    self.job.poll()
                    time.sleep(0.001)
            self.kv.close()

    def at_rest(self) -> bool:
        return (
            self.kv.settled
            and self.kv.size == SLOTS
            and not self.broker.due
            and all(not one.moving for one in self.shares)
        )


def undisturbed(kind: str, folder: Path) -> list[float]:
    spec = small.spec(folder, max_steps=STEPS)
    made: Any
    if kind == "slot":
        made = CpuSlot(small.model(), folder, None).job(spec)
    else:
        made = Trainer(small.model(), spec, small.rows(), base_name="small")
    losses = []
    while not made.done:
        made.launch(0) if kind == "slot" else made.run_next()
        losses += [metric.loss for metric in made.take_metrics()]
    made.close()
    return losses


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_a_cpu: None) -> Iterator[type[Orders]]:
    if importlib.util.find_spec("sgl_kernel") is None:
        from core.serving import cpu_standin

        cpu_standin.install()
    from core.serving import elastic

    monkeypatch.setattr(arena_module, "CPU_PAGE_BYTES", PAGE)
    monkeypatch.setattr(Move, "synchronize", synchronize)
    monkeypatch.setattr(Swappable.__init__, "__defaults__", (2 * PAGE,))  # several windows
    before = torch.get_num_threads()
    torch.set_num_threads(1)

    class Ready(Orders):
        pass

    Ready.elastic, Ready.folder = elastic, tmp_path
    Ready.losses = {kind: undisturbed(kind, tmp_path / kind) for kind in ("slot", "metered")}
    Ready.sources = {"slot": small.model(), "metered": small.model()}
    yield Ready
    torch.set_num_threads(before)


def test_memory_is_right_in_any_order_of_events(orders: type[Orders]) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        orders,
        settings=settings(
            max_examples=25,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
