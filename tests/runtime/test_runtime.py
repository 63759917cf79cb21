"""The runtime between an engine's steps: real link, real trainer, a clock that the test winds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from core.errors import Invalid
from core.finetune.trainer import Trainer
from core.link.messages import (
    EngineNotice,
    FromEngine,
    Goodbye,
    Hello,
    JobSpec,
    JobUpdate,
    Learnt,
    PauseJob,
    SetTargets,
    StartJob,
    StopJob,
    Target,
    Telemetry,
    ToEngine,
)
from core.link.transport import ControlEnd
from core.policy.types import TaskletKind
from core.runtime.runtime import Load, Prepared, Runtime
from tests.finetune import small
from tests.runtime.link import PromptEnd

TASKLET_S = 0.010
HELLO = Hello(
    engine_id="engine-test",
    pid=1,
    http_url="http://127.0.0.1:1",
    model="small",
    model_path="small",
    device="cpu",
    device_name="test",
    dtype="float32",
    parameters=1,
    versions={},
    max_lora_rank=16,
    lora_modules=("q_proj",),
    kv_tokens=1000,
    max_running_requests=8,
    partitions=("whole",),
)


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


class TimedTrainer(Trainer):
    """A trainer whose tasklets take ten milliseconds of the test's clock each."""

    clock: Clock
    fail_at: int | None = None
    ran = 0

    def run_next(self) -> TaskletKind:
        self.clock.now += TASKLET_S
        self.ran += 1
        if self.fail_at == self.ran:
            raise torch.OutOfMemoryError("no memory")
        return super().run_next()


@dataclass
class Bench:
    """An engine of the test's making around a runtime, and the control plane's end of its link."""

    runtime: Runtime
    link: PromptEnd
    control: ControlEnd
    clock: Clock
    output: Path
    fail_at: list[int] = field(default_factory=list)
    received: list[FromEngine] = field(default_factory=list)
    pending: list[FromEngine] = field(default_factory=list)
    heard: int = 0

    def send(self, message: ToEngine) -> None:
        assert self.control.send(HELLO.engine_id, message)
        self.link.await_message()

    def start(self, token: int = 1, resume_from: str | None = None, **changes: object) -> None:
        self.send(StartJob(spec=self.spec(**changes), token=token, resume_from=resume_from))

    def spec(self, **changes: object) -> JobSpec:
        return small.spec(self.output, **changes)

    def decode(
        self, requests: int = 1, step_s: float = 0.050, waiting: int = 0, adapters: tuple[str | None, ...] = ()
    ) -> float:
        """One decode step; returns the seconds that the runtime then spent on finetuning."""
        self.runtime.step_begins()
        self.clock.now += step_s
        return self.result(requests, waiting, adapters)

    def result(self, requests: int = 1, waiting: int = 0, adapters: tuple[str | None, ...] = ()) -> float:
        names = [f"r{n}" for n in range(requests)]
        before = self.clock.now
        load = Load(names, 1 if waiting else 0, waiting, 100 * requests, 100, 100, 1000, adapters)
        self.runtime.decode_ended([(name, False) for name in names], load, adapters)
        return self.clock.now - before

    def idle(self) -> bool:
        return self.runtime.idle(Load((), 0, 0, 0, 0, 0, 1000))

    def until(self, done: Callable[[FromEngine], bool], step: Callable[[], object] | None = None) -> FromEngine:
        """Let the engine go on (idle, by default) until such a message has come."""
        deadline = time.monotonic() + 20.0
        while time.monotonic() < deadline:
            while self.pending:
                if done(message := self.pending.pop(0)):
                    return message
            (step or self.idle)()
            self.pending += self.drain()
            self.clock.now += 0.001
            time.sleep(0.001)
        raise AssertionError(f"did not come; got {[type(m).__name__ for m in self.received]}")

    def drain(self) -> list[FromEngine]:
        """What the runtime has sent by now and was not received yet."""
        fresh: list[FromEngine] = []
        while self.heard < self.link.sent:
            if (got := self.control.receive(2_000)) is None:
                self.heard = self.link.sent  # the rest went to a control plane that is gone
            else:
                self.heard += 1
                fresh.append(got[1])
        self.received += fresh
        return fresh

    def update(self, kind: str) -> JobUpdate:
        found = self.until(lambda m: isinstance(m, JobUpdate) and m.kind == kind)
        assert isinstance(found, JobUpdate)
        return found


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    url = f"ipc://{tmp_path}/link.sock"
    control, clock = ControlEnd(url), Clock()
    link = PromptEnd(url, HELLO.engine_id)
    fail_at: list[int] = []

    def prepare(order: StartJob) -> Trainer:
        if order.spec.dataset_path == "missing.parquet":
            raise Invalid("dataset_file_missing", "there is no missing.parquet", "dataset")
        resume = Path(order.resume_from) if order.resume_from else None
        trainer = TimedTrainer(small.model(), order.spec, small.rows(), base_name="small", resume_from=resume)
        trainer.clock = clock
        trainer.fail_at = fail_at[0] if fail_at else None
        return trainer

    runtime = Runtime(
        Prepared(HELLO, torch.device("cpu"), prepare),
        link,
        policy="tasklet_slices",
        margin=0.1,
        calibration_prefix="calibration-",
        clock=clock,
    )
    made = Bench(runtime, link, control, clock, tmp_path, fail_at)
    calibrate(made)
    made.until(lambda m: isinstance(m, Hello))
    yield made
    runtime.close()
    control.close()


def calibrate(bench: Bench) -> None:
    for _ in range(20):
        bench.runtime.step_begins()
        bench.clock.now += 0.040
        bench.runtime.decode_ended([("calibration-0", False)], Load((), 0, 0, 1, 1, 1, 1000))
    bench.runtime.finish_calibration()


def target(bench: Bench, ms: float, version: int = 1) -> None:
    bench.send(SetTargets(version=version, targets=(Target(kind="itl", ms=ms),)))


def test_hello_tells_the_solo_step_time(bench: Bench) -> None:
    hello = next(m for m in bench.received if isinstance(m, Hello))
    assert hello.solo_itl_ms == pytest.approx(40.0)
    assert hello.running_job is None


def test_calibration_counts_as_nobodys_latency(bench: Bench) -> None:
    bench.clock.now += 1.0
    told = bench.until(lambda m: isinstance(m, Telemetry))
    assert isinstance(told, Telemetry) and told.itl == []


def test_a_job_runs_while_nothing_decodes(bench: Bench) -> None:
    bench.start(max_steps=16)
    assert bench.update("started").total_steps == 16
    losses = [bench.update("metric").loss or 0.0 for _ in range(16)]
    done = bench.update("succeeded")
    assert sum(losses[-4:]) < sum(losses[:4])
    assert done.path is not None and (Path(done.path) / "adapter_model.safetensors").exists()
    assert done.token == 1


def test_finetuning_takes_what_the_target_leaves_and_no_more(bench: Bench) -> None:
    bench.start(max_steps=500)
    bench.update("started")
    target(bench, 100.0)
    for _ in range(30):
        bench.decode()
    spent = [bench.decode() for _ in range(40)]
    # 100 ms less a tenth, less the 50 ms step: 40 ms, four tasklets at the most.
    assert max(spent) <= 0.040 + 1e-9
    assert sum(spent) / len(spent) >= 0.020


def test_a_tighter_target_holds_from_the_next_step_on(bench: Bench) -> None:
    bench.start(max_steps=500)
    bench.update("started")
    target(bench, 200.0)
    for _ in range(40):
        bench.decode()
    assert bench.decode() > 0.0
    target(bench, 60.0, version=2)
    bench.decode()
    spent = [bench.decode() for _ in range(20)]
    assert sum(spent) / len(spent) < 0.002
    told = bench.until(lambda m: isinstance(m, Telemetry) and m.targets_version == 2)
    assert isinstance(told, Telemetry)


def test_a_step_obeys_the_target_of_the_tenant_whose_request_runs(bench: Bench) -> None:
    bench.start(max_steps=500)
    bench.update("started")
    everyones, own = Target(kind="itl", ms=60.0), Target(kind="itl", ms=200.0, tenant="batch")
    bench.send(SetTargets(version=1, targets=(everyones, own), tenants={"nightly": "batch"}))
    for _ in range(40):
        bench.decode(adapters=("nightly",))
    alone = [bench.decode(adapters=("nightly",)) for _ in range(20)]
    assert sum(alone) / len(alone) > 0.05, "only a request of the tenant with the loose target runs"
    bench.decode(requests=2, adapters=("nightly", None))
    mixed = [bench.decode(requests=2, adapters=("nightly", None)) for _ in range(20)]
    assert sum(mixed) / len(mixed) < 0.005, "another's request is kept to the tight one"
    told = bench.until(lambda m: isinstance(m, Telemetry) and bool(m.tenant_itl))
    assert isinstance(told, Telemetry) and set(told.tenant_itl) == {"batch"}


def test_what_was_learnt_without_a_profile_is_told_while_a_job_runs(bench: Bench) -> None:
    bench.start(max_steps=500)
    bench.update("metric")
    target(bench, 150.0)
    for _ in range(200):
        bench.decode()
    learnt = bench.until(lambda m: isinstance(m, Learnt), step=bench.decode)
    assert isinstance(learnt, Learnt)
    ((batch, mean, bound),) = learnt.steps
    assert (batch, mean) == (1, pytest.approx(50.0, rel=0.1)) and bound >= mean
    assert learnt.tasklets["forward"][0] == pytest.approx(10.0, rel=0.1)
    assert learnt.mix["optimizer"] == 1.0 and learnt.step_tokens > 0
    bench.send(StopJob(job_id="job", token=1))
    bench.update("cancelled")
    bench.drain()
    bench.received.clear()
    for _ in range(300):
        bench.decode()
    assert any(isinstance(m, Telemetry) for m in bench.drain())
    assert not any(isinstance(m, Learnt) for m in bench.received), "what was told of an ended job stays"


def test_without_a_job_nothing_comes_between_steps(bench: Bench) -> None:
    target(bench, 1000.0)
    assert [bench.decode() for _ in range(5)] == [0.0] * 5


def test_a_waiting_prompt_goes_before_finetuning(bench: Bench) -> None:
    bench.start(max_steps=500)
    bench.update("started")
    target(bench, 500.0)
    for _ in range(30):
        bench.decode()
    assert bench.decode(waiting=50) == 0.0
    assert bench.decode() > 0.0


def test_the_guard_pauses_finetuning_when_gaps_pass_the_target_and_says_so(bench: Bench) -> None:
    bench.start(max_steps=500)
    bench.update("started")
    target(bench, 100.0)
    for _ in range(30):
        bench.decode()
    for _ in range(4):
        bench.decode(step_s=0.150)
    assert bench.decode() == 0.0
    notice = bench.until(lambda m: isinstance(m, EngineNotice), step=bench.decode)
    assert isinstance(notice, EngineNotice) and notice.code == "guard"
    assert notice.message.startswith("finetuning paused: gaps over 100 ms")
    # Clean steps lift the guard; the bound on decode itself forgets the slow steps only when they are one in a hundred.
    spent = [bench.decode() for _ in range(500)]
    assert spent[10] == 0.0 and spent[-1] > 0.0
    lifted = bench.until(lambda m: isinstance(m, EngineNotice), step=bench.decode)
    assert isinstance(lifted, EngineNotice) and lifted.code == "guard_lifted"
    reports = [m for m in bench.received if isinstance(m, Telemetry)]
    assert sum(m.guard_pauses for m in reports) == 1 and sum(m.guarded_s for m in reports) > 1.0


def test_in_overlap_order_the_next_step_is_launched_before_the_last_ones_result(bench: Bench) -> None:
    bench.start(max_steps=500)
    bench.update("started")
    target(bench, 100.0)
    for _ in range(30):
        bench.decode()
    spent = []
    bench.runtime.step_begins()
    for _ in range(30):
        bench.runtime.step_begins()  # step n + 1 goes out
        bench.clock.now += 0.050
        spent.append(bench.result())  # and the result of step n is in
    assert 0.0 < max(spent) <= 0.040 + 1e-9


def test_pause_keeps_a_checkpoint_and_a_later_start_goes_on_from_it(bench: Bench) -> None:
    bench.start()
    for _ in range(3):
        bench.update("metric")
    bench.send(PauseJob(job_id="job", token=1))
    paused = bench.update("paused")
    assert paused.step >= 3 and paused.path is not None
    assert bench.idle() is False
    bench.start(token=2, resume_from=paused.path)
    assert bench.update("started").step == paused.step
    assert bench.update("metric").step == paused.step + 1
    assert bench.update("succeeded").token == 2


def test_stop_with_save_gives_the_adapter_as_it_stands(bench: Bench) -> None:
    bench.start(max_steps=500)
    bench.update("metric")
    bench.send(StopJob(job_id="job", token=1, save=True))
    done = bench.update("succeeded")
    assert done.step < 500 and done.path is not None and (Path(done.path) / "adapter_config.json").exists()


def test_stop_without_save_leaves_nothing(bench: Bench) -> None:
    bench.start(max_steps=500)
    bench.update("metric")
    bench.send(StopJob(job_id="job", token=1))
    bench.update("cancelled")
    assert not (bench.output / "adapter").exists()


def test_an_order_under_an_old_token_is_refused_in_words(bench: Bench) -> None:
    bench.start(token=2, max_steps=500)
    bench.update("started")
    bench.send(StopJob(job_id="job", token=1))
    notice = bench.until(lambda m: isinstance(m, EngineNotice))
    assert isinstance(notice, EngineNotice) and "token 1" in notice.message
    bench.update("metric")


def test_a_second_job_is_refused_while_one_runs(bench: Bench) -> None:
    bench.start(max_steps=500)
    bench.update("started")
    bench.start(job_id="other")
    failed = bench.update("failed")
    assert (failed.job_id, failed.code) == ("other", "engine_busy")


def test_the_same_job_under_a_newer_token_goes_on(bench: Bench) -> None:
    bench.start(max_steps=500)
    bench.update("started")
    bench.start(token=7, max_steps=500)
    later = bench.until(lambda m: isinstance(m, JobUpdate) and m.kind == "metric" and m.token == 7)
    assert isinstance(later, JobUpdate)


def test_a_job_that_cannot_be_prepared_fails_with_place_and_remedy(bench: Bench) -> None:
    bench.start(dataset_path="missing.parquet")
    failed = bench.update("failed")
    assert (failed.code, failed.param) == ("dataset_file_missing", "dataset")


@pytest.mark.parametrize("tasklet", [1, 2, 3, 4, 5, 6, 7, 20])
def test_a_failure_at_any_tasklet_ends_the_job_and_not_the_engine(bench: Bench, tasklet: int) -> None:
    bench.fail_at.append(tasklet)
    bench.start()
    failed = bench.update("failed")
    assert failed.code == "out_of_memory" and failed.param == "micro_batch_tokens"
    target(bench, 500.0)
    assert bench.decode() == 0.0
    bench.fail_at.clear()
    bench.start(token=2)
    bench.update("succeeded")


def test_closing_checkpoints_what_runs_and_says_goodbye(bench: Bench) -> None:
    bench.start(max_steps=500)
    for _ in range(2):
        bench.update("metric")
    bench.runtime.close()
    interrupted = bench.until(lambda m: isinstance(m, JobUpdate) and m.kind == "interrupted", step=lambda: None)
    assert isinstance(interrupted, JobUpdate) and interrupted.path is not None
    assert (Path(interrupted.path) / "state.json").exists()
    assert any(isinstance(m, Goodbye) for m in [*bench.received, *bench.drain()])


def test_a_control_plane_that_comes_back_is_told_of_the_running_job(bench: Bench, tmp_path: Path) -> None:
    bench.start(max_steps=5000)
    bench.update("started")
    bench.control.close()
    bench.control = ControlEnd(f"ipc://{tmp_path}/link.sock")
    hello = bench.until(lambda m: isinstance(m, Hello))
    assert isinstance(hello, Hello)
    assert (hello.running_job, hello.running_token) == ("job", 1)


def test_an_idle_engine_stays_awake_while_the_layers_of_the_next_tasklets_are_on_their_way(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.start()
    bench.update("started")
    with monkeypatch.context() as patch:
        patch.setattr(TimedTrainer, "upcoming", lambda trainer, count: ())
        before = bench.clock.now
        assert bench.idle() is True and bench.clock.now == before, "awake, and nothing ran"
    assert bench.idle() is True and bench.clock.now > before
