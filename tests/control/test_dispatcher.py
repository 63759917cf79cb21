"""Handing jobs to the engine and following them, over the real link."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import apscheduler.schedulers.base
import apscheduler.triggers.interval
import pytest

from core.api import schemas
from core.control import adapters, dispatcher, engines, jobs, owner, pacing, targets, telemetry
from core.control.context import Control
from core.control.owner import Owner
from core.errors import Conflict
from core.link.messages import PauseJob, PlanView, SetTargets, StartJob, StopJob
from db import base, changes
from db import engines as engine_rows
from tests.clock import wall
from tests.control import files
from tests.control.figures import history
from tests.control.peer import EnginePeer
from tests.stack import until

# What is no different on the two databases is tried with one.
either = pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)
Submit = Callable[..., schemas.Job]
Connect = Callable[..., EnginePeer]
Running = tuple[schemas.Job, StartJob]


def engine_view(control: Control) -> schemas.Engine:
    with control.store.read() as session:
        return engines.view(session)


@pytest.fixture
def without_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the dispatcher does in time, it did because something was written."""
    monkeypatch.setattr(owner, "_TICK_S", 3600.0)


def reaches(control: Control, job_id: str, state: str, timeout_s: float = 30.0) -> schemas.Job:
    def ready() -> schemas.Job | None:
        job = jobs.get(control, job_id)
        return job if job.state == state else None

    return until(ready, timeout_s, f"{job_id} to be {state}, it is {jobs.get(control, job_id)}")


def kinds(control: Control, job_id: str) -> list[str]:
    return [event.kind for event in jobs.events(control, job_id, 0, 100)]


# ---- the engine ------------------------------------------------------------------------------------------------------


def test_an_engine_that_says_hello_is_shown_and_gets_the_measured_target(control: Control, engine: EnginePeer) -> None:
    sent = engine.expect(SetTargets)
    assert (sent.version, [(t.kind, t.ms, t.quantile) for t in sent.targets]) == (1, [("itl", 41.0, 0.99)])
    shown = engine_view(control)
    assert (shown.state, shown.id, shown.model, shown.solo_itl_ms) == ("ready", "engine-1", "small", 13.4)
    engine.telemetry(targets_version=1)
    with control.store.read() as session:
        assert targets.view(session).origin == "measured"

    def applied() -> bool:
        with control.store.read() as session:
            return targets.view(session).applied_version == 1

    until(applied, what="the engine's targets to be noted")


@pytest.mark.usefixtures("without_ticks")
def test_a_moved_target_reaches_the_engine_at_once(control: Control, engine: EnginePeer) -> None:
    engine.expect(SetTargets)
    update = schemas.TargetsUpdate.model_validate({"version": 1, "targets": [{"kind": "itl", "ms": 30}]})
    targets.put(control, update)
    assert engine.expect(SetTargets).targets[0].ms == 30


def test_what_the_engine_reports_is_summed_up_exactly(control: Control, engine: EnginePeer) -> None:
    engine.expect(SetTargets)
    plan = PlanView(policy="tasklet_slices", after=2.5, reason="slack")
    engine.telemetry(itl=[(10.0, 50), (40.0, 49), (90.0, 1)], decode_tokens=100, decode_steps=4, plan=plan, running=25)
    live = until(lambda: (found := telemetry.live(control, 60)).window and found, what="the figures")
    assert isinstance(live, schemas.Live)
    assert live.window is not None
    assert (live.window.itl_p50_ms, live.window.itl_p99_ms) == (10.0, 40.0)
    assert live.window.attainment == 0.99
    assert live.window.decode_tokens_s == 200.0
    assert (live.window.plan, live.window.plan_after, live.window.running) == ("tasklet_slices whole", 2.5, 25)


def test_a_seconds_figures_are_in_the_store_a_second_later(control: Control, engine: EnginePeer) -> None:
    engine.expect(SetTargets)
    base = float(int(time.time())) - 3
    for offset in (0.2, 0.7, 1.2):
        engine.telemetry(time=base + offset, itl=[(10.0 + offset, 1)])
    points = until(lambda: history(control, 60, 60), what="a point")
    assert points[0].time.timestamp() == base
    assert points[0].itl_p99_ms == pytest.approx(10.7)


def test_what_the_engine_has_to_say_is_shown(control: Control, engine: EnginePeer) -> None:
    engine.expect(SetTargets)
    engine.notice("fallback", "no CUDA graph for batch 3")
    notices = until(lambda: engine_view(control).notices, what="the notice")
    assert (notices[0].code, notices[0].message) == ("fallback", "no CUDA graph for batch 3")


def test_an_engine_of_another_protocol_is_not_used(control: Control, connect: Connect, submit: Submit) -> None:
    peer = connect()
    peer.hello(protocol=99)
    submit()
    peer.nothing(StartJob)
    assert engine_view(control).state == "absent"


def test_bytes_that_are_no_message_do_no_harm(control: Control, engine: EnginePeer) -> None:
    engine.expect(SetTargets)
    engine._end._socket.send(b"\x93what")
    engine.notice("still", "here")
    until(lambda: engine_view(control).notices, what="the next message")


# ---- handing out -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_ticks")
def test_a_submitted_job_is_handed_out_at_once_with_all_that_it_needs(
    control: Control, engine: EnginePeer, submit: Submit
) -> None:
    engine.expect(SetTargets)
    job = submit(learning_rate=5e-4, lora={"rank": 4, "dropout": 0.1}, max_steps=12, priority=3, seed=7)
    order = engine.expect(StartJob)
    spec = order.spec
    assert (spec.job_id, spec.adapter_name, spec.learning_rate, spec.max_steps) == (job.id, "sailor", 5e-4, 12)
    assert (spec.epochs, spec.lora.rank, spec.lora.dropout, spec.priority, spec.seed) == (None, 4, 0.1, 3, 7)
    assert (spec.micro_batch_tokens, spec.sequence_length) == (256, 256)
    assert spec.output_dir == str(control.job_folder(job.id))
    assert Path(spec.dataset_path).is_file()
    assert order.resume_from is None
    assert jobs.get(control, job.id).state == "starting"


def test_jobs_go_by_priority_then_age_one_at_a_time(control: Control, connect: Connect, submit: Submit) -> None:
    late, early, urgent = submit("a", priority=-1), submit("b"), submit("c", priority=5)
    engine = connect()
    engine.hello()
    for expected in (urgent, early, late):
        order = engine.expect(StartJob)
        assert order.spec.job_id == expected.id
        engine.nothing(StartJob, 0.4)
        engine.update(expected.id, order.token, "started", total_steps=1)
        engine.update(expected.id, order.token, "failed", code="x", message="gone wrong")


def test_a_waiting_job_says_whom_it_waits_for(control: Control, running: Running, submit: Submit) -> None:
    job, _ = running
    other = submit("mate")
    assert job.id in (other.waiting_reason or "")
    assert jobs.get(control, job.id).waiting_reason is None


def test_a_job_whose_data_set_file_is_gone_fails_and_says_so(
    control: Control, connect: Connect, submit: Submit, dataset: schemas.Dataset
) -> None:
    job = submit()
    control.dataset_file(dataset.id).unlink()
    connect().hello()
    failed = reaches(control, job.id, "failed")
    assert failed.error is not None
    assert (failed.error.code, failed.error.param) == ("dataset_missing", "dataset")


# ---- following -------------------------------------------------------------------------------------------------------


def test_what_the_job_measures_is_kept(control: Control, engine: EnginePeer, running: Running) -> None:
    job, order = running
    reaches(control, job.id, "running")
    engine.update(job.id, order.token, "metric", step=1, loss=4.0, learning_rate=1e-3, grad_norm=0.5, tokens=256)
    engine.update(job.id, order.token, "metric", step=2, loss=3.0, tokens=512, epoch=0.5)
    engine.update(job.id, order.token, "metric", step=2, eval_loss=3.5)
    engine.update(job.id, order.token, "log", message="halfway")
    until(lambda: jobs.log(control, job.id, 0, 100)[-1].message == "halfway", what="the log")
    assert [line.message for line in jobs.log(control, job.id, 0, 100)] == [
        "starting: handed to the engine",
        "running: the engine runs it",
        "step 1 of 30: loss 4.0000, learning rate 0.001, gradient norm 0.5, tokens 256",
        "step 2 of 30: loss 3.0000, tokens 512",
        "step 2 of 30: evaluation loss 3.5000",
        "halfway",
    ]
    seen = jobs.get(control, job.id)
    assert (seen.step, seen.total_steps, seen.epoch, seen.tokens) == (2, 30, 0.5, 512)
    assert (seen.first_loss, seen.loss, seen.eval_loss) == (4.0, 3.0, 3.5)
    first, second = jobs.metrics(control, job.id, -1, 10)
    assert (first.loss, first.learning_rate, first.grad_norm) == (4.0, 1e-3, 0.5)
    assert (second.loss, second.eval_loss) == (3.0, 3.5)
    assert jobs.metrics(control, job.id, 1, 10) == [second]


def test_what_came_meanwhile_is_written_at_once_and_in_order(
    control: Control, engine: EnginePeer, running: Running
) -> None:
    job, order = running
    reaches(control, job.id, "running")
    written: list[frozenset[str]] = []
    control.store.on_commit(lambda tables: written.append(tables) if "job_metrics" in tables else None)
    with control.store.write():
        for step in range(1, 51):
            engine.update(job.id, order.token, "metric", step=step, loss=1 / step)
        time.sleep(0.5)
    until(lambda: jobs.get(control, job.id).step == 50, what="the last step")
    assert len(written) <= 10
    assert jobs.get(control, job.id).loss == 1 / 50
    told = [line.message for line in jobs.log(control, job.id, 0, 100)][-50:]
    assert told == [f"step {step} of 30: loss {1 / step:.4f}" for step in range(1, 51)]
    with control.store.read() as session:
        steps = [change.data["step"] for change in changes.after(session, 0, 500) if change.kind == "metric"]
    assert steps == list(range(1, 51))


def test_what_cannot_be_kept_takes_nothing_with_it(control: Control, engine: EnginePeer, running: Running) -> None:
    job, order = running
    reaches(control, job.id, "running")
    with control.store.write():
        engine.update(job.id, order.token, "metric", step=1, loss=4.0)
        for step, at in ((2, time.time()), (3, 1e20), (4, time.time())):
            engine.update(job.id, order.token, "metric", step=step, loss=3.0, time=at)
        time.sleep(0.3)
    until(lambda: jobs.get(control, job.id).step == 4, what="the last step")
    assert [metric.step for metric in jobs.metrics(control, job.id, -1, 10)] == [1, 2, 4]


def test_a_job_that_succeeds_becomes_an_adapter_that_is_wanted(
    control: Control, engine: EnginePeer, running: Running
) -> None:
    job, order = running
    folder = files.adapter(Path(order.spec.output_dir) / "adapter")
    engine.update(job.id, order.token, "saving", step=30)
    engine.update(job.id, order.token, "succeeded", step=30, path=str(folder), tokens=7000)
    done = reaches(control, job.id, "succeeded")
    assert (done.adapter_version, done.step, done.tokens) == (1, 30, 7000)
    assert kinds(control, job.id) == ["submitted", "starting", "running", "saving", "succeeded"]
    adapter = adapters.get(control, "sailor")
    assert (adapter.wanted_version, adapter.deployment) == (1, "loading")
    version = adapter.versions[0]
    assert (version.origin, version.job_id, version.dataset_id, version.rank) == ("trained", job.id, job.dataset_id, 8)
    stored = control.adapter_folder("sailor", 1)
    assert sorted(path.name for path in stored.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


def test_a_job_that_is_not_to_be_deployed_is_only_stored(control: Control, engine: EnginePeer, submit: Submit) -> None:
    job = submit(deploy=False)
    order = engine.expect(StartJob)
    folder = files.adapter(Path(order.spec.output_dir) / "adapter")
    engine.update(job.id, order.token, "succeeded", step=1, path=str(folder))
    reaches(control, job.id, "succeeded")
    assert adapters.get(control, "sailor").wanted_version is None


def test_a_success_without_a_usable_adapter_is_a_failure_that_says_why(
    control: Control, engine: EnginePeer, running: Running
) -> None:
    job, order = running
    engine.update(job.id, order.token, "succeeded", step=30, path=order.spec.output_dir + "/nowhere")
    failed = reaches(control, job.id, "failed")
    assert failed.error is not None
    assert failed.error.code == "adapter_unusable"
    assert "nowhere" in failed.error.message


def test_an_adapter_that_the_disk_has_no_room_for_is_stored_once_it_has(
    control: Control, engine: EnginePeer, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, order = running
    unpacked, full = adapters.unpacked, threading.Event()

    def tried(*where: Any, **limits: Any) -> Any:
        if not full.is_set():
            full.set()
            Path("/dev/full").write_bytes(b"x")  # the kernel's own full device
        return unpacked(*where, **limits)

    monkeypatch.setattr(adapters, "unpacked", tried)
    folder = files.adapter(Path(order.spec.output_dir) / "adapter")
    engine.update(job.id, order.token, "saving", step=30)
    engine.update(job.id, order.token, "succeeded", step=30, path=str(folder), tokens=7000)
    assert reaches(control, job.id, "succeeded").adapter_version == 1
    assert full.is_set()


def test_a_failure_keeps_its_code_message_and_place(control: Control, engine: EnginePeer, running: Running) -> None:
    job, order = running
    engine.update(job.id, order.token, "failed", code="out_of_memory", message="lower it", param="micro_batch_tokens")
    failed = reaches(control, job.id, "failed")
    assert failed.error == schemas.ErrorDetail(code="out_of_memory", message="lower it", param="micro_batch_tokens")
    assert failed.ended_at is not None


def test_what_comes_under_an_old_token_changes_nothing_and_is_told_to_stop(
    control: Control, engine: EnginePeer, running: Running
) -> None:
    job, order = running
    reaches(control, job.id, "running")
    engine.update(job.id, order.token - 1, "metric", step=29, loss=0.1)
    told = engine.expect(StopJob)
    assert (told.job_id, told.token, told.save) == (job.id, order.token - 1, False)
    engine.update(job.id, order.token - 1, "failed", code="x", message="x")
    engine.update(job.id, order.token, "metric", step=1, loss=4.0)
    until(lambda: jobs.metrics(control, job.id, -1, 10), what="the fresh metric")
    seen = jobs.get(control, job.id)
    assert (seen.state, seen.step, seen.loss) == ("running", 1, 4.0)


def test_a_job_that_stands_still_says_why(control: Control, engine: EnginePeer, running: Running) -> None:
    job, _ = running
    reaches(control, job.id, "running")

    def told() -> str | None:
        engine.telemetry(paused_reason="four misses in twenty steps")
        return jobs.get(control, job.id).waiting_reason

    reason = until(told, what="the reason", pause_s=0.3)
    assert reason == "finetuning stands still for the moment: four misses in twenty steps"


# ---- asking things of a job that runs --------------------------------------------------------------------------------


@either
@pytest.mark.usefixtures("without_ticks")
def test_what_is_asked_of_a_job_reaches_the_engine_at_once(
    control: Control, engine: EnginePeer, submit: Submit
) -> None:
    engine.expect(SetTargets)
    job = submit()
    order = engine.expect(StartJob)
    jobs.pause(control, job.id)
    assert engine.expect(PauseJob).token == order.token


def test_pausing_checkpoints_and_resuming_goes_on_from_there(
    control: Control, engine: EnginePeer, running: Running
) -> None:
    job, order = running
    reaches(control, job.id, "running")
    asked = jobs.pause(control, job.id)
    told = engine.expect(PauseJob)
    assert (told.job_id, told.token) == (job.id, order.token)
    assert asked.state == "running"
    assert asked.waiting_reason == "it is about to be paused"
    path = files.checkpoint(Path(order.spec.output_dir), 12)
    engine.update(job.id, order.token, "metric", step=12, loss=2.0)
    engine.update(job.id, order.token, "paused", step=12, path=str(path))
    reaches(control, job.id, "paused")
    engine.nothing(StartJob, 0.7)
    jobs.resume(control, job.id)
    again = engine.expect(StartJob)
    assert again.token > order.token
    assert again.resume_from == str(path)
    engine.update(job.id, again.token, "started", step=12, total_steps=30)
    resumed = reaches(control, job.id, "running")
    assert (resumed.step, resumed.resumes) == (12, 1)
    assert kinds(control, job.id) == [
        "submitted", "starting", "running", "pause_asked", "paused", "resumed", "starting", "running",
    ]  # fmt: skip


def test_while_one_job_is_paused_another_runs(
    control: Control, engine: EnginePeer, running: Running, submit: Submit
) -> None:
    job, order = running
    other = submit("mate")
    reaches(control, job.id, "running")
    jobs.pause(control, job.id)
    engine.expect(PauseJob)
    engine.update(job.id, order.token, "paused", step=3)
    assert engine.expect(StartJob).spec.job_id == other.id


def test_stopping_without_saving_cancels(control: Control, engine: EnginePeer, running: Running) -> None:
    job, order = running
    reaches(control, job.id, "running")
    jobs.stop(control, job.id, save=False)
    told = engine.expect(StopJob)
    assert (told.token, told.save) == (order.token, False)
    engine.update(job.id, order.token, "cancelled", step=4)
    assert reaches(control, job.id, "cancelled").error is None


def test_stopping_with_saving_makes_an_adapter_of_what_there_is(
    control: Control, engine: EnginePeer, running: Running
) -> None:
    job, order = running
    engine.update(job.id, order.token, "metric", step=4, loss=2.0)
    until(lambda: jobs.get(control, job.id).step == 4)
    jobs.stop(control, job.id, save=True)
    assert engine.expect(StopJob).save
    folder = files.adapter(Path(order.spec.output_dir) / "adapter")
    engine.update(job.id, order.token, "saving", step=4)
    engine.update(job.id, order.token, "succeeded", step=4, path=str(folder))
    assert reaches(control, job.id, "succeeded").adapter_version == 1


def test_pressing_twice_sends_one_command_and_a_stop_replaces_a_pause(
    control: Control, engine: EnginePeer, running: Running
) -> None:
    job, _ = running
    reaches(control, job.id, "running")
    jobs.pause(control, job.id)
    jobs.pause(control, job.id)
    engine.expect(PauseJob)
    engine.nothing(PauseJob)
    jobs.stop(control, job.id, save=False)
    engine.expect(StopJob)
    with pytest.raises(Conflict, match="stop was asked of it"):
        jobs.pause(control, job.id)
    assert kinds(control, job.id)[-2:] == ["pause_asked", "stop_asked"]


def test_a_job_that_ran_is_saved_from_its_checkpoint_without_an_engine(
    control: Control, engine: EnginePeer, running: Running
) -> None:
    job, order = running
    path = files.checkpoint(Path(order.spec.output_dir), 20)
    engine.update(job.id, order.token, "checkpoint", step=20, path=str(path))
    engine.update(job.id, order.token, "paused", step=20, path=str(path))
    reaches(control, job.id, "paused")
    engine.goodbye()
    until(lambda: engine_view(control).state == "absent")
    assert jobs.stop(control, job.id, save=True).state == "saving"
    done = reaches(control, job.id, "succeeded")
    assert done.adapter_version == 1
    assert control.adapter_folder("sailor", 1).is_dir()


def test_the_best_adapter_is_what_is_saved_from_a_checkpoint(
    control: Control, engine: EnginePeer, submit: Submit
) -> None:
    job = submit(keep_best=True, evaluate_every=10)
    order = engine.expect(StartJob)
    assert order.spec.keep_best
    engine.update(job.id, order.token, "started", total_steps=30)
    engine.update(job.id, order.token, "metric", step=10, eval_loss=1.5, best_step=10, best_loss=1.5)
    folder = Path(order.spec.output_dir)
    path = files.checkpoint(folder, 20)
    (path / "state.json").write_text('{"step": 20, "best_step": 10}')
    files.adapter(folder / "evaluated" / "step-00000010", rank=4)
    engine.update(job.id, order.token, "paused", step=20, path=str(path))
    assert reaches(control, job.id, "paused").best_step == 10
    jobs.stop(control, job.id, save=True)
    reaches(control, job.id, "succeeded")
    assert adapters.get(control, "sailor").versions[0].rank == 4


def test_what_an_engine_says_of_an_early_stop_and_the_best_step_is_kept(
    control: Control, engine: EnginePeer, running: Running
) -> None:
    job, order = running
    engine.update(job.id, order.token, "stopped_early", step=8, message="stopped early at step 8: no improvement")
    folder = files.adapter(Path(order.spec.output_dir) / "adapter")
    engine.update(job.id, order.token, "succeeded", step=8, path=str(folder), message="that of step 4")
    reaches(control, job.id, "succeeded")
    said = [event.message for event in jobs.events(control, job.id, 0, 100)]
    assert "stopped early at step 8: no improvement" in said
    assert said[-1] == "stored as adapter sailor@1, that of step 4"


@pytest.mark.parametrize(
    ("save", "checkpoint", "ends"), [(False, False, "cancelled"), (True, True, "succeeded"), (True, False, "cancelled")]
)
def test_an_engine_that_does_not_do_what_was_asked_does_not_hold_the_job_up(
    control: Control,
    engine: EnginePeer,
    running: Running,
    monkeypatch: pytest.MonkeyPatch,
    save: bool,
    checkpoint: bool,
    ends: str,
) -> None:
    job, order = running
    engine.update(job.id, order.token, "metric", step=4, loss=2.0)
    if checkpoint:
        path = files.checkpoint(Path(order.spec.output_dir), 4)
        engine.update(job.id, order.token, "checkpoint", step=4, path=str(path))
    until(lambda: jobs.get(control, job.id).step == 4)
    until(lambda: ("checkpoint" in kinds(control, job.id)) == checkpoint)
    jobs.stop(control, job.id, save=save)
    assert engine.expect(StopJob).save == save
    monkeypatch.setitem(dispatcher.COMMAND_S, "save" if save else "stop", 0.1)
    reaches(control, job.id, ends)
    told = engine.expect(StopJob)
    assert (told.token, told.save) == (order.token, False), "the engine still holds it, and is told to let go"


@either
@pytest.mark.parametrize("by", [timedelta(hours=-1), timedelta(hours=1)])
def test_how_long_an_engine_takes_has_nothing_to_do_with_a_clock_that_is_set(
    control: Control, engine: EnginePeer, running: Running, monkeypatch: pytest.MonkeyPatch, by: timedelta
) -> None:
    put_clock = wall(monkeypatch, base, pacing, apscheduler.schedulers.base, apscheduler.triggers.interval)
    job, order = running
    reaches(control, job.id, "running")
    jobs.pause(control, job.id)
    engine.expect(PauseJob)
    put_clock(by)
    time.sleep(2.5)  # it is looked at twice
    assert jobs.get(control, job.id).state == "running"
    assert engine_view(control).state == "ready"
    monkeypatch.setitem(dispatcher.COMMAND_S, "pause", 0.1)
    reaches(control, job.id, "paused")
    assert engine.expect(StopJob).token == order.token
    assert "settled without it" in jobs.events(control, job.id, 0, 100)[-2].message


def test_the_next_job_waits_until_the_engine_has_let_go(
    control: Control, engine: EnginePeer, running: Running, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(dispatcher.COMMAND_S, "stop", 0.3)
    job, order = running
    other = submit("mate")
    jobs.stop(control, job.id, save=False)
    reaches(control, job.id, "cancelled")
    engine.nothing(StartJob)
    engine.update(job.id, order.token, "cancelled")
    assert engine.expect(StartJob).spec.job_id == other.id


# ---- engines that go away --------------------------------------------------------------------------------------------


def test_a_killed_engines_job_is_interrupted_and_resumed_by_the_next(
    control: Control, connect: Connect, engine: EnginePeer, running: Running
) -> None:
    job, order = running
    path = files.checkpoint(Path(order.spec.output_dir), 10)
    engine.update(job.id, order.token, "metric", step=10, loss=3.0)
    engine.update(job.id, order.token, "checkpoint", step=10, path=str(path))
    engine.update(job.id, order.token, "metric", step=13, loss=2.5)
    until(lambda: jobs.get(control, job.id).step == 13)
    engine.close()
    fresh = connect("engine-2")
    fresh.hello()
    again = fresh.expect(StartJob)
    assert (again.spec.job_id, again.resume_from) == (job.id, str(path))
    assert again.token > order.token
    fresh.update(job.id, again.token, "started", step=10, total_steps=30)
    resumed = reaches(control, job.id, "running")
    assert (resumed.step, resumed.resumes) == (10, 1)
    assert [metric.step for metric in jobs.metrics(control, job.id, -1, 100)] == [10], "what is done again is forgotten"
    assert "interrupted" in kinds(control, job.id)
    assert engine_view(control).id == "engine-2"


def test_a_checkpoint_that_was_written_but_not_reported_is_found(
    control: Control, connect: Connect, engine: EnginePeer, running: Running
) -> None:
    job, order = running
    reported = files.checkpoint(Path(order.spec.output_dir), 10)
    engine.update(job.id, order.token, "checkpoint", step=10, path=str(reported))
    until(lambda: "checkpoint" in kinds(control, job.id))
    newest = files.checkpoint(Path(order.spec.output_dir), 20)
    (newest.parent / "step-00000030").mkdir()
    fresh = connect("engine-2")
    fresh.hello()
    assert fresh.expect(StartJob).resume_from == str(newest), "one that is not whole does not count"


@either
def test_the_next_engine_is_the_current_one_also_when_the_clock_was_set_back(
    control: Control, connect: Connect, engine: EnginePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.expect(SetTargets)
    second = connect("engine-2")
    second.hello()
    second.expect(SetTargets)
    wall(monkeypatch, base)(timedelta(hours=-1))
    third = connect("engine-3")
    third.hello()
    third.expect(SetTargets)
    shown = engine_view(control)
    assert (shown.id, shown.state) == ("engine-3", "ready")
    with control.store.read() as session:
        assert [record.id for record in engine_rows.newest_first(session)] == ["engine-3", "engine-2", "engine-1"]


def test_an_engine_that_stops_on_purpose_leaves_its_job_resumable(
    control: Control, connect: Connect, engine: EnginePeer, running: Running
) -> None:
    job, order = running
    path = files.checkpoint(Path(order.spec.output_dir), 5)
    engine.update(job.id, order.token, "interrupted", step=5, path=str(path))
    engine.goodbye()
    reaches(control, job.id, "interrupted")
    until(lambda: engine_view(control).state == "absent")
    assert "no engine is connected" in (jobs.get(control, job.id).waiting_reason or "")
    fresh = connect("engine-2")
    fresh.hello()
    assert fresh.expect(StartJob).resume_from == str(path)


def test_an_engine_that_is_stopping_is_given_no_job_not_even_the_one_that_it_lets_go_of(
    control: Control, engine: EnginePeer, running: Running, connect: Connect, submit: Submit
) -> None:
    job, order = running
    submit("other", priority=9)
    engine.stopping()
    engine.update(job.id, order.token, "interrupted", step=4)
    reaches(control, job.id, "interrupted")
    engine.nothing(StartJob)
    engine.goodbye()
    assert kinds(control, job.id).count("starting") == 1
    successor = connect("engine-2")
    successor.hello()
    assert successor.expect(StartJob).spec.adapter_name == "other"


def test_an_engine_that_lets_a_job_be_paused_while_it_stops_gets_no_other(
    control: Control, engine: EnginePeer, running: Running, submit: Submit
) -> None:
    job, order = running
    other = submit("other")
    engine.stopping()
    engine.update(job.id, order.token, "paused", step=4)
    reaches(control, job.id, "paused")
    engine.nothing(StartJob)
    assert jobs.get(control, other.id).state == "queued"


def test_a_silent_engine_is_lost_and_its_job_interrupted(
    control: Control, engine: EnginePeer, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, _ = running
    reaches(control, job.id, "running")  # the last that is heard of it
    monkeypatch.setattr(dispatcher, "SILENCE_S", 0.5)
    reaches(control, job.id, "interrupted")
    assert engine_view(control).state == "lost"
    assert "does not answer" in (jobs.get(control, job.id).waiting_reason or "")


def test_an_engine_that_was_only_slow_goes_on_with_its_job(
    control: Control, engine: EnginePeer, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, order = running
    reaches(control, job.id, "running")
    with monkeypatch.context() as patch:
        patch.setattr(dispatcher, "SILENCE_S", 0.3)
        reaches(control, job.id, "interrupted")
    engine.telemetry()
    reaches(control, job.id, "running")
    engine.update(job.id, order.token, "metric", step=9, loss=1.0)
    until(lambda: jobs.get(control, job.id).step == 9)
    assert engine_view(control).state == "ready"
    engine.nothing(StartJob, 0.3)


def test_an_engine_that_still_holds_a_job_that_was_stopped_meanwhile_lets_go(
    control: Control, engine: EnginePeer, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, order = running
    reaches(control, job.id, "running")
    with monkeypatch.context() as patch:
        patch.setattr(dispatcher, "SILENCE_S", 0.3)
        reaches(control, job.id, "interrupted")
    jobs.stop(control, job.id, save=False)
    engine.telemetry()
    told = engine.expect(StopJob)
    assert (told.job_id, told.token) == (job.id, order.token)
    assert jobs.get(control, job.id).state == "cancelled"


def test_an_old_engine_that_comes_back_beside_its_successor_is_told_to_stop(
    control: Control, connect: Connect, engine: EnginePeer, running: Running
) -> None:
    job, order = running
    fresh = connect("engine-2")
    fresh.hello()
    again = fresh.expect(StartJob)
    fresh.update(job.id, again.token, "started", total_steps=30)
    engine.update(job.id, order.token, "metric", step=29, loss=0.0)
    assert engine.expect(StopJob).token == order.token
    assert jobs.get(control, job.id).step == 0


def test_a_job_that_brings_every_engine_down_is_given_up_on_until_someone_resumes_it(
    control: Control, connect: Connect, engine: EnginePeer, running: Running
) -> None:
    job, _ = running
    for number in range(2, 4):
        peer = connect(f"engine-{number}")
        peer.hello()
        order = peer.expect(StartJob)
        peer.update(job.id, order.token, "started", total_steps=30)
    last = connect("engine-4")
    last.hello()
    last.nothing(StartJob)
    stuck = jobs.get(control, job.id)
    assert stuck.state == "interrupted"
    assert "interrupted 3 times in a row" in (stuck.waiting_reason or "")
    jobs.resume(control, job.id)
    assert last.expect(StartJob).spec.job_id == job.id


@pytest.mark.parametrize(("command", "ends"), [("pause", "paused"), ("stop", "cancelled"), ("save", "succeeded")])
def test_what_was_asked_of_a_job_is_done_when_its_engine_dies_first(
    control: Control, connect: Connect, engine: EnginePeer, running: Running, command: str, ends: str
) -> None:
    job, order = running
    path = files.checkpoint(Path(order.spec.output_dir), 10)
    engine.update(job.id, order.token, "metric", step=10, loss=3.0)
    engine.update(job.id, order.token, "checkpoint", step=10, path=str(path))
    until(lambda: "checkpoint" in kinds(control, job.id))
    if command == "pause":
        jobs.pause(control, job.id)
    else:
        jobs.stop(control, job.id, save=command == "save")
    connect("engine-2").hello()
    reaches(control, job.id, ends)


def test_an_engine_that_is_busy_with_something_unknown_gets_the_job_later(
    control: Control, engine: EnginePeer, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "_BUSY_PAUSE_S", 0.5)
    job = submit()
    order = engine.expect(StartJob)
    engine.update(job.id, order.token, "failed", code="engine_busy", message="the engine still runs job job-x")
    reaches(control, job.id, "interrupted")
    assert engine.expect(StartJob).token > order.token


def test_a_new_owner_hands_nothing_out_before_the_engine_has_reported_to_it(
    control: Control, owner: Owner, engine: EnginePeer, submit: Submit
) -> None:
    engine.expect(SetTargets)
    owner.stop()
    job = submit()
    successor = Owner(control)
    engine.close()
    successor.start()
    try:
        time.sleep(0.6)
        assert jobs.get(control, job.id).state == "queued"
    finally:
        successor.stop()


@pytest.mark.postgres
@pytest.mark.parametrize("store_url", ["postgres"], indirect=True)
def test_a_store_that_drops_every_connection_does_not_end_the_dispatching(
    control: Control, engine: EnginePeer, running: Running
) -> None:
    job, order = running
    reaches(control, job.id, "running")
    with control.store.engine.connect() as connection:
        others = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
        connection.exec_driver_sql(f"{others} WHERE datname = current_database() AND pid <> pg_backend_pid()")
        engine.update(job.id, order.token, "metric", step=1, loss=4.0)
    until(lambda: jobs.get(control, job.id).step == 1, what="the metric")
    engine.update(job.id, order.token, "metric", step=2, loss=3.0)
    until(lambda: jobs.get(control, job.id).step == 2, what="the next metric")


def test_a_new_owner_goes_on_with_the_job_that_the_engine_holds(
    control: Control, owner: Owner, engine: EnginePeer, running: Running
) -> None:
    job, order = running
    reaches(control, job.id, "running")
    engine.reconnected()  # it has said hello to the first
    owner.stop()
    successor = Owner(control)
    successor.start()
    try:
        until(engine.reconnected, what="the engine to reconnect")
        engine.hello(running_job=job.id, running_token=order.token)
        engine.update(job.id, order.token, "metric", step=8, loss=1.5)
        until(lambda: jobs.get(control, job.id).step == 8)
        assert "interrupted" not in kinds(control, job.id)
        engine.nothing(StartJob, 0.3)
    finally:
        successor.stop()


def test_a_write_of_a_dispatcher_that_lost_its_lease_is_refused(control: Control, owner: Owner, submit: Submit) -> None:
    del owner
    stale = dispatcher.Dispatcher(control, lambda _id, _message: True, holder="someone", token=0)
    with pytest.raises(dispatcher.LeaseLost):
        stale._hello(_hello_of_a_stranger())
    assert engine_view(control).state == "absent"


def _hello_of_a_stranger() -> dispatcher.Hello:
    return dispatcher.Hello(
        engine_id="stranger",
        pid=1,
        http_url="",
        model="m",
        model_path="",
        device="cpu",
        device_name="",
        dtype="float32",
        parameters=1,
        versions={},
        max_lora_rank=8,
        lora_modules=(),
        kv_tokens=1,
        max_running_requests=1,
        partitions=(),
    )
