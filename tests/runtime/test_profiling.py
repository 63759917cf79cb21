"""Facts about taking a profile on the engine, and about where it is kept; a device on a clock that the test turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from core.finetune.trainer import Trainer
from core.link.messages import EngineNotice, FromEngine, Hello, StartJob, Telemetry
from core.link.transport import ControlEnd, EngineEnd
from core.policy.types import WHOLE, Layout, TaskletKind
from core.predictor.moving import MovingPredictor
from core.predictor.profile import Machine, MicroBatch, Profile, read_profile
from core.predictor.two_stage import TwoStagePredictor
from core.runtime.executor import Executor, Expectation, Size
from core.runtime.profiles import ProfileStore, Profiling, forget
from core.runtime.profiling import SETTLE, STEPS, Profiler, Turn, turns
from core.runtime.runtime import Load, Prepared, Queued, Runtime
from core.serving import activation
from tests.runtime.device import Clock, Event, Steady, Stream
from tests.runtime.test_runtime import HELLO

SPLIT, CONFINED = Layout("split", 64, 68), Layout("confined", 0, 68)
LAYOUTS = (WHOLE, SPLIT, CONFINED)
KINDS: tuple[TaskletKind, ...] = ("forward",) * 6 + ("head",) * 2 + ("backward",) * 6 + ("optimizer",)
MS: dict[TaskletKind, float] = {"forward": 1.5, "head": 2.0, "backward": 2.5, "optimizer": 0.5}
MACHINE = Machine(gpu="test", sms=132, driver="1", model="small", engine="sglang", dtype="bfloat16")
MICRO_BATCH = MicroBatch(tokens=256, rank=8, layers=6, heads=2)
CAPTURED = (1, 2, 4, 8)
STEP_MS = {Turn(WHOLE, False): 6.0, Turn(SPLIT, False): 7.0, Turn(SPLIT, True): 9.0, Turn(CONFINED, True): 8.0}


class Work:
    """Micro-batches of known tasklets, twice as slow on a part."""

    kinds = KINDS

    def __init__(self, streams: dict[Layout, Stream]) -> None:
        self._streams, self._next = streams, 0

    def upcoming(self, count: int) -> tuple[TaskletKind, ...]:
        return self.kinds[self._next : self._next + count]

    def on(self, layout: Layout) -> nullcontext[None]:
        return nullcontext()

    def launch(self, layout: Layout) -> TaskletKind:
        kind = self.kinds[self._next]
        self._next = (self._next + 1) % len(self.kinds)
        self._streams[layout].run(MS[kind] * (1 if layout == WHOLE else 2))
        return kind


class Bench:
    """An engine in SGLang's overlap order: a step is launched when the last but one is over."""

    def __init__(self, layouts: Sequence[Layout] = LAYOUTS, room: tuple[int, int] = (4096, 16_384)) -> None:
        self.clock = Clock()
        self.decode, whole, part = (Stream(name, self.clock) for name in ("decode", "whole", "part"))
        self.finetune = {layout: whole if layout == WHOLE else part for layout in layouts}
        self.selected: list[Layout] = [WHOLE]
        self.profiler = Profiler(
            self.executor, self.finetune, Work(self.finetune), machine=MACHINE, micro_batch=MICRO_BATCH,
            captured=CAPTURED, kv_heads=4, room=room,
        )  # fmt: skip
        self._ends: list[float] = []

    def executor(self, expectation: Expectation) -> Executor:
        return Executor(
            self.decode, self.finetune, select=self.selected.append, new_event=lambda: Event(self.clock),
            expectation=expectation, clock=self.clock,
        )  # fmt: skip

    def step(self, number: int, requests: int, context: int) -> None:
        profiler, padded = self.profiler, next(size for size in CAPTURED if size >= requests)
        profiler.step_begins(number, requests, Size(padded, requests * context, context))
        turn = profiler._turn
        self._ends.append(self.decode.run(STEP_MS[turn] + 0.01 * padded)[1])
        profiler.step_launched()
        if len(self._ends) > 1:
            self.clock.ms = max(self.clock.ms, self._ends[-2])
            profiler.step_ended()

    def take(self) -> None:
        """Everything, as the launcher asks for it."""
        self.profiler.time_tasklets()
        for number, (requests, context) in enumerate(self.profiler.batches):
            self.profiler.other_batch()
            for step in range(self.profiler.steps):
                self.step(number, requests, context + step)
            self.clock.ms = self._ends[-1]
        self.profiler.leave()


@pytest.fixture(scope="module")
def taken() -> Profile:
    bench = Bench()
    bench.take()
    return bench.profiler.profile()


def test_every_layout_has_its_turn_alone_and_beside() -> None:
    assert turns(LAYOUTS) == list(STEP_MS)


def test_every_batch_gives_a_point_of_every_turn_with_what_its_steps_took(taken: Profile) -> None:
    batches = Bench().profiler.batches
    assert len(taken.points) == len(batches) * len(STEP_MS)
    assert {point.batch for point in taken.points} == {requests for requests, _ in batches}
    for point in taken.points:
        ms = STEP_MS[Turn(point.layout, point.beside is not None)] + 0.01 * point.batch
        assert point.ms == pytest.approx(ms)
        assert point.p99_ms == pytest.approx(ms)


def test_a_point_is_of_the_tokens_that_its_steps_had(taken: Profile) -> None:
    for point in taken.points:
        assert point.kv_tokens == point.batch * point.max_kv
    longest = max(context for _, context in Bench().profiler.batches)
    assert longest < max(point.max_kv for point in taken.points) <= longest + len(STEP_MS) * STEPS


def test_tasklets_are_timed_alone_on_every_part_and_next_to_decode(taken: Profile) -> None:
    alone = {(one.layout, one.kind): one.ms for one in taken.tasklets if not one.batch}
    assert alone == {
        (layout, kind): pytest.approx(ms * (1 if layout == WHOLE else 2))
        for layout in LAYOUTS
        for kind, ms in MS.items()
    }
    beside = {one.layout for one in taken.tasklets if one.batch}
    assert beside == {SPLIT, CONFINED}


def test_a_predictor_can_be_fitted_to_it_and_promises_nothing_beyond(taken: Profile) -> None:
    predictor = TwoStagePredictor(taken)
    assert predictor.decode_ms(WHOLE, 8, 8 * 1000, 1000) == pytest.approx(6.08, rel=0.03)
    assert predictor.decode_upper_ms(SPLIT, 8, 8 * 1000, "forward", 1000) >= 9.0
    assert predictor.tasklet_ms(SPLIT, "backward", 8, 8000) == pytest.approx(5.0, rel=0.15)
    assert predictor.decode_upper_ms(WHOLE, 9, 9000, None) == float("inf")


def test_steps_at_the_start_of_a_turn_do_not_count_since_older_work_ends_in_them() -> None:
    bench = Bench()
    bench.take()
    counted = [len(found) for found in bench.profiler._measured.values()]
    assert set(counted) == {STEPS - SETTLE}


def test_a_batch_that_is_not_whole_is_not_measured() -> None:
    bench = Bench()
    bench.profiler.time_tasklets()
    requests, context = bench.profiler.batches[0]
    for _ in range(40):
        bench.step(0, requests - 1 or 2, context)
    with pytest.raises(ValueError, match="none of the"):
        bench.profiler.profile()


def test_afterwards_the_engine_has_its_own_graphs_and_nothing_is_queued() -> None:
    bench = Bench()
    bench.take()
    assert bench.selected[-1] == WHOLE
    assert all(stream.until <= bench.clock.ms for stream in (bench.decode, *bench.finetune.values()))


def test_no_batch_outgrows_the_room_that_the_engine_has() -> None:
    bench = Bench(room=(600, 5_000))
    for requests, context in bench.profiler.batches:
        assert context + bench.profiler.steps <= 600
        assert requests * (context + bench.profiler.steps) <= 5_000
    assert Bench(room=(40, 5_000)).profiler.batches == ()


# ---- where it is kept ------------------------------------------------------------------------------------------------


def profiling(folder: Path, layouts: Sequence[Layout] = LAYOUTS, room: tuple[int, int] = (4096, 16_384)) -> Profiling:
    bench = Bench(layouts, room)
    made = Profiling(
        ProfileStore(folder, MACHINE), layouts, CAPTURED, MICRO_BATCH, lambda: bench.profiler, lambda rids: None
    )
    made.bench = bench  # type: ignore[attr-defined]
    return made


def finished(made: Profiling) -> Profiling:
    made.bench.take()  # type: ignore[attr-defined]
    made.finish()
    return made


def test_the_first_start_takes_a_profile_and_the_next_one_reads_it(tmp_path: Path) -> None:
    first = profiling(tmp_path)
    assert isinstance(first.predictor, MovingPredictor)
    assert first.fallback == "this GPU has no profile"
    finished(first)
    assert isinstance(first.predictor, TwoStagePredictor)
    assert first.fallback == ""
    second = profiling(tmp_path)
    assert second.profiler is None
    assert isinstance(second.predictor, TwoStagePredictor)
    (path,) = tmp_path.iterdir()
    assert read_profile(path, MACHINE).micro_batch == MICRO_BATCH


def test_an_engine_that_ended_while_it_took_one_starts_without_and_says_why(tmp_path: Path) -> None:
    profiling(tmp_path)  # and ends
    second = profiling(tmp_path)
    assert second.profiler is None
    assert "ended while it took one" in second.fallback and "harli profile" in second.fallback
    assert forget(tmp_path) == []
    assert profiling(tmp_path).profiler is not None


def test_an_engine_that_ends_in_order_meanwhile_tries_again(tmp_path: Path) -> None:
    profiling(tmp_path).close()
    assert profiling(tmp_path).profiler is not None


def test_a_profile_without_a_layout_or_a_batch_that_the_engine_has_is_taken_again(tmp_path: Path) -> None:
    finished(profiling(tmp_path, (WHOLE, SPLIT)))
    again = profiling(tmp_path)
    assert again.profiler is not None
    assert again.fallback == "this GPU's profile was taken without layouts confined(68)"


def test_forgetting_the_profiles_has_them_taken_again(tmp_path: Path) -> None:
    finished(profiling(tmp_path))
    assert len(forget(tmp_path)) == 1
    assert profiling(tmp_path).profiler is not None


def test_an_engine_without_room_goes_on_without_a_profile(tmp_path: Path) -> None:
    made = profiling(tmp_path, room=(40, 40))
    assert made.profiler is None
    assert "no room" in made.fallback
    assert not list(tmp_path.iterdir())


def test_a_broken_profile_is_told_and_taken_again(tmp_path: Path) -> None:
    finished(profiling(tmp_path))
    (path,) = tmp_path.iterdir()
    path.write_text("{}")
    again = profiling(tmp_path)
    assert again.profiler is not None
    assert str(path) in again.fallback


# ---- in the runtime --------------------------------------------------------------------------------------------------


class Announced:
    """A runtime over the fake device, and the control plane's end of its link."""

    def __init__(self, folder: Path, room: tuple[int, int] = (4096, 16_384)) -> None:
        self.bench = Bench(room=room)
        bench = self.bench
        self.profiling = Profiling(
            ProfileStore(folder / "profiles", MACHINE), LAYOUTS, CAPTURED, MICRO_BATCH, lambda: bench.profiler,
            activation.profile_batch,
        )  # fmt: skip
        url = f"ipc://{folder}/link.sock"
        self.control = ControlEnd(url)
        places = {WHOLE: 0, SPLIT: 1, CONFINED: 1}
        main = bench.executor(Steady(6.0, 2.0))
        self.runtime = Runtime(
            Prepared(
                hello=HELLO, device=torch.device("cpu"), prepare=_no_job,
                queued=Queued(main, places, lambda batch: next(size for size in CAPTURED if size >= batch)),
                profiling=self.profiling,
            ),
            EngineEnd(url, HELLO.engine_id), policy="hybrid", margin=0.0,
            calibration_prefix=activation.CALIBRATION_PREFIX, clock=bench.clock,
        )  # fmt: skip

    def decode(self, rids: Sequence[str], context: int, steps: int) -> None:
        bench = self.bench
        self.runtime.step_begins()
        ends: list[float] = []
        for step in range(steps):
            load = Load(list(rids), 0, 0, len(rids) * (context + step), context + step, 0, 16_384)
            self.runtime.decode_begins(load)
            turn = bench.profiler._turn if activation.profile_batch(rids) is not None else Turn(WHOLE, False)
            ends.append(bench.decode.run(STEP_MS[turn])[1])
            self.runtime.decode_launched()
            if step:
                bench.clock.ms = max(bench.clock.ms, ends[-2])
                self.runtime.decode_ended([(rid, False) for rid in rids], load)
        bench.clock.ms = max(bench.clock.ms, ends[-1])
        self.runtime.decode_ended([(rid, True) for rid in rids], load)

    def received(self) -> list[FromEngine]:
        found = []
        while (got := self.control.receive(300 if not found else 20)) is not None:
            found.append(got[1])
        return found

    def close(self) -> None:
        self.runtime.close()
        self.control.close()


def _no_job(order: StartJob) -> Trainer:
    raise AssertionError("no job is started")


@pytest.fixture
def announced(tmp_path: Path) -> Iterator[Announced]:
    made = Announced(tmp_path)
    yield made
    made.close()


def test_the_engines_own_batches_are_measured_before_it_is_announced(announced: Announced) -> None:
    profiler = announced.profiling.profiler
    assert profiler is not None
    announced.decode([f"{activation.CALIBRATION_PREFIX}{n}" for n in range(4)], 16, 20)
    for number, (requests, context) in enumerate(profiler.batches):
        announced.decode([activation.profile_rid(number, n) for n in range(requests)], context, profiler.steps)
    announced.runtime.finish_calibration()
    (hello,) = announced.received()
    assert isinstance(hello, Hello)
    assert hello.solo_itl_ms == pytest.approx(6.0)  # of the calibration's steps alone
    assert isinstance(announced.profiling.predictor, TwoStagePredictor)
    assert announced.runtime._predictor is announced.profiling.predictor
    announced.bench.clock.ms += 1000.0
    announced.runtime.idle(Load((), 0, 0, 0, 0, 0, 16_384))
    reports = [message for message in announced.received() if isinstance(message, Telemetry)]
    assert [report.decode_tokens for report in reports] == [0]


def test_a_new_predictor_is_told_of_the_job_that_runs_by_then(announced: Announced, taken: Profile) -> None:
    """Its tasklets take three times as long as those that the profile was taken of."""
    runtime, profiling = announced.runtime, announced.profiling
    job = SimpleNamespace(
        relative={"forward": 3.0}, ended=False, token=1, spec=SimpleNamespace(job_id="job-1"),
        poll=lambda: None, view=lambda: None, interrupt=lambda: None,
    )  # fmt: skip
    runtime._job = job  # type: ignore[assignment]
    profiling.profiler = None
    for _ in range(2):
        alone = TwoStagePredictor(taken).tasklet_ms(WHOLE, "forward")
        profiling.predictor = TwoStagePredictor(taken)
        runtime._calibration = []
        runtime.finish_calibration()
        runtime.idle(Load((), 0, 0, 0, 0, 0, 16_384))
        assert profiling.predictor.tasklet_ms(WHOLE, "forward") == pytest.approx(3.0 * alone)


def test_a_request_of_somebody_else_meanwhile_is_decoded_with_the_engines_own_graphs(announced: Announced) -> None:
    profiler = announced.profiling.profiler
    assert profiler is not None
    requests, context = profiler.batches[0]
    own = [activation.profile_rid(0, n) for n in range(requests)]
    announced.decode(own, context, 2 * STEPS)
    assert announced.bench.selected[-1] == SPLIT
    announced.decode([*own[1:], "somebody"], context, 2)
    assert announced.bench.selected[-1] == WHOLE


def test_why_there_is_no_profile_is_told_once_the_engine_is_announced(tmp_path: Path) -> None:
    announced = Announced(tmp_path, room=(40, 40))
    announced.runtime.finish_calibration()
    hello, notice = announced.received()
    assert isinstance(hello, Hello)
    assert isinstance(notice, EngineNotice)
    assert notice.code == "no_profile"
    assert "no room" in notice.message and "slack behind the steps" in notice.message
    announced.close()
