"""Before a job is queued: presets, what hangs on evaluations, methods that are not served, estimates, clones."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from core.api import presets, schemas
from core.api.errors import explain
from core.control import adapters, estimates, jobs, speed
from core.control.context import Control
from core.errors import Invalid
from core.intake import packing
from db import telemetry
from db.base import now
from db.engines import EngineRecord
from db.jobs import JobRecord
from tests.control import files
from tests.control.peer import MODULES

Submit = Callable[..., schemas.Job]
HELLO: dict[str, Any] = {
    "model": "small", "model_path": "nowhere", "max_lora_rank": 8, "lora_modules": list(MODULES), "dtype": "float32",
    "http_url": "http://127.0.0.1:1", "device": "cpu", "device_name": "a CPU",
}  # fmt: skip


@pytest.fixture
def store_url(sqlite_url: str) -> str:
    return sqlite_url


def engine(control: Control, **hello: Any) -> None:
    time = now() - timedelta(hours=2)
    with control.store.write() as session:
        session.add(EngineRecord(id="e", state="ready", hello={**HELLO, **hello}, since=time, state_since=time))


def body(**fields: Any) -> schemas.JobCreate:
    return schemas.JobCreate.model_validate({"dataset": "rivers", "adapter_name": "sailor", **fields})


def reports(control: Control, points: list[tuple[float, float]], *, reason: str = "slack", ago_s: int = 60) -> None:
    """A second each, oldest first: (finetune tokens/s, decode tokens/s)."""
    with control.store.write() as session:
        start = now().replace(microsecond=0) - timedelta(seconds=ago_s)
        rows = [
            (
                start + timedelta(seconds=n),
                {"finetune_tokens_s": tuned, "decode_tokens_s": decoded, "plan_reason": reason, "paused_reason": None},
                b"",
            )
            for n, (tuned, decoded) in enumerate(points)
        ]
        telemetry.put(session, 1, rows)


# ---- presets ---------------------------------------------------------------------------------------------------------


def test_a_large_data_set_is_passed_over_fewer_times() -> None:
    epochs = [presets.fields("balanced", rows, None, 256)["epochs"] for rows in (400, 4_000, 400_000)]
    assert epochs == sorted(epochs, reverse=True) and len(set(epochs)) == 3
    assert presets.fields("quick", 400_000, None, 256)["epochs"] < 1
    held_out = presets.fields("balanced", 400_000, None, 256)["evaluation_fraction"] * 400_000
    assert held_out == pytest.approx(500, rel=0.01)


def test_thorough_is_evaluated_about_ten_times_and_keeps_the_best() -> None:
    chosen = presets.fields("thorough", 900, 100_000, 256)
    steps = 100_000 * 0.95 * chosen["epochs"] / 256
    assert 8 <= steps / chosen["evaluate_every"] <= 12
    assert (chosen["patience"], chosen["keep_best"]) == (3, True)


def test_what_is_given_goes_before_the_preset(control: Control, submit: Submit) -> None:
    engine(control)
    spec = submit(preset="thorough", learning_rate=1e-4, lora={"alpha": 5.0}).spec
    assert (spec.learning_rate, spec.lora.alpha, spec.patience, spec.epochs) == (1e-4, 5.0, 3, 5.0)
    assert spec.lora.rank == 8, "within what the engine serves"
    steps = submit("mate", preset="thorough", max_steps=7).spec
    assert (steps.max_steps, steps.epochs) == (7, None)
    plain = submit("cook", preset="thorough", evaluation_fraction=0).spec
    assert (plain.patience, plain.keep_best) == (0, False)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"patience": 2, "evaluate_every": 5, "evaluation_fraction": 0}, "evaluation_fraction"),
        ({"patience": 2}, "evaluate_every"),
        ({"keep_best": True}, "evaluate_every"),
        ({"sample_prompts": ["Ahoy?"], "evaluation_fraction": 0}, "evaluation_fraction"),
        ({"deadline": "2020-01-01T00:00:00Z"}, "deadline"),
    ],
)
def test_what_cannot_come_about_is_refused_with_its_field(submit: Submit, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Invalid) as caught:
        submit(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "whole modules"),
        ({"bias": "all"}, "biases"),
        ({"lora_bias": True}, "biases"),
        ({"load_in_4bit": True}, "full precision"),
        ({"quantization": {"bits": 4}}, "full precision"),
        ({"rank_pattern": {"q_proj": 4}}, "one rank"),
        ({"layers_to_transform": [1]}, "every layer"),
        ({"peft_type": "PROMPT_TUNING"}, "only LoRA"),
        ({"init_lora_weights": "pissa"}, "default"),
        ({"target_modules": "all-linear"}, "by name"),
    ],
)
def test_a_method_that_is_not_served_is_refused_with_the_reason(lora: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        body(lora=lora)
    param, message = explain(caught.value.errors(), schemas.JobCreate)
    (field,) = lora
    assert param == "lora" and f"lora.{field} is" in message and said in message


def test_what_says_nothing_and_pefts_own_names_are_read() -> None:
    lora = {"r": 4, "lora_alpha": 9.0, "lora_dropout": 0.1, "use_dora": False, "bias": "none", "modules_to_save": None}
    made = body(lora=lora).lora
    assert (made.rank, made.alpha, made.dropout) == (4, 9.0, 0.1)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"lora": {"rank": 4, "dropout": 0.1}}, "lora.dropout"),
        ({"lora": {"rank": 4}, "micro_batch_tokens": 512}, "micro_batch_tokens"),
        ({"lora": {"rank": 8}}, "lora.rank"),
    ],
)
def test_what_the_captured_tasklets_do_not_run_is_refused_before_it_waits(
    control: Control, submit: Submit, fields: dict[str, Any], param: str
) -> None:
    engine(control, finetune_slot=[4, 256])
    with pytest.raises(Invalid, match="captured") as caught:
        submit(**fields)
    assert caught.value.param == param
    assert submit(lora={"rank": 4}).state == "queued"


# ---- estimates -------------------------------------------------------------------------------------------------------

LENGTHS = [60, 90, 120, 30] * 25


def resolved(**fields: Any) -> schemas.JobCreate:
    return body(micro_batch_tokens=256, sequence_length=256, **fields)


@pytest.mark.parametrize("fields", [{"epochs": 2.5}, {"max_steps": 9}, {"epochs": 1, "accumulation": 4}])
def test_the_work_is_what_the_trainer_will_do(fields: dict[str, Any]) -> None:
    spec = resolved(evaluate_every=4, **fields)
    todo = estimates.work(LENGTHS, spec)
    train, held_out = packing.split(len(LENGTHS), spec.evaluation_fraction, spec.seed)
    micro_batches = 0
    if spec.max_steps is not None:
        micro_batches = spec.max_steps * spec.accumulation
    else:
        left = spec.epochs or 0.0
        for epoch in range(3):
            plan = packing.epoch_plan([LENGTHS[row] for row in train], 256, seed=spec.seed, epoch=epoch)
            micro_batches += -int(-len(plan) * min(1.0, max(left - epoch, 0.0)) // 1)
    assert todo.micro_batches == pytest.approx(micro_batches, abs=2)
    assert todo.training_rows == len(train) and held_out
    assert todo.steps == -(-todo.micro_batches // spec.accumulation)
    assert 0 <= todo.padding_share < 0.2


def test_without_a_measurement_nothing_is_said_of_time(control: Control, submit: Submit) -> None:
    submit()
    found = jobs.estimate(control, body(adapter_name="mate"))
    assert (found.speed, found.seconds, found.seconds_per_step, found.eta, found.wait_s) == (None,) * 5
    assert any("no speed was measured" in note for note in found.notes)
    assert found.memory.fits is None and found.rows == 8


def test_the_speed_is_what_the_engine_reported_while_a_job_was_there(control: Control) -> None:
    engine(control)
    reports(control, [(100.0, 50.0)] * 6 + [(0.0, 50.0)] * 2 + [(400.0, 0.0)] * 4)
    with control.store.read() as session:
        measured = speed.measured(session)
    assert measured is not None
    assert measured.tokens_s == pytest.approx((6 * 100 + 4 * 400) / 12), "seconds in which nothing fitted count"
    assert measured.alone_tokens_s == pytest.approx(400.0)


def test_seconds_without_a_job_and_another_models_engine_do_not_count(control: Control) -> None:
    engine(control)
    reports(control, [(0.0, 50.0)] * 20, reason="no job")
    with control.store.read() as session:
        assert speed.measured(session) is None
    reports(control, [(100.0, 50.0)] * 20, ago_s=30)
    with control.store.write() as session:
        hello = {**HELLO, "model": "other"}
        session.add(EngineRecord(id="new", state="ready", hello=hello, since=now(), state_since=now()))
    with control.store.read() as session:
        assert speed.measured(session) is None


def test_the_speed_is_known_when_the_clock_was_set_back_behind_the_engines_hello(control: Control) -> None:
    engine(control)
    reports(control, [(100.0, 50.0)] * 10)
    with control.store.write() as session:
        session.get_one(EngineRecord, "e").since = now() + timedelta(minutes=30)
    with control.store.read() as session:
        measured = speed.measured(session)
    assert measured is not None and measured.tokens_s == pytest.approx(100)


def test_an_estimate_adds_up(control: Control) -> None:
    spec = resolved(epochs=1, deadline=now() + timedelta(seconds=30))
    todo = estimates.work(LENGTHS, spec)
    measured = speed.Speed(tokens_s=50.0, seconds=60, measured_at=now())
    before = JobRecord(expected_tokens=1000, total_steps=10, step=5)
    found = estimates.estimate(spec, 100, LENGTHS, speed=measured, before=[before], engine=None, model=None)
    assert found.seconds == pytest.approx(todo.tokens / 50)
    assert found.seconds_per_step == pytest.approx(todo.tokens / 50 / todo.steps)
    assert found.wait_s == pytest.approx(10.0)
    assert found.eta is not None and abs((found.eta - datetime.now(UTC)).total_seconds() - 10 - todo.tokens / 50) < 20
    assert any("deadline" in note for note in found.notes)
    unknown = estimates.estimate(
        spec, 100, LENGTHS, speed=measured, before=[JobRecord(tokens=0)], engine=None, model=None
    )
    assert (unknown.wait_s, unknown.eta) == (None, None)


def test_memory_grows_with_what_costs_it() -> None:
    config = {
        "hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152,
    }  # fmt: skip
    usual = estimates.needed_bytes(config, resolved(), "float32")
    assert 2**26 < usual < 2**31
    wider = resolved().model_copy(update={"micro_batch_tokens": 1024})
    assert estimates.needed_bytes(config, wider, "float32") > 3 * usual
    assert estimates.needed_bytes(config, resolved(lora={"rank": 64}), "float32") > usual
    assert estimates.needed_bytes(config, resolved(), "bfloat16") < usual


# ---- clones ----------------------------------------------------------------------------------------------------------


def test_a_clone_is_the_same_job_but_for_what_is_changed(control: Control, submit: Submit) -> None:
    job = submit(learning_rate=3e-4, lora={"rank": 4}, epochs=2, patience=2, evaluate_every=5, priority=3)
    jobs.stop(control, job.id, save=False)
    same, new = jobs.clone(control, job.id, {}, None)
    expected = job.spec.model_copy(update={"dataset": job.dataset_id})
    assert new and same.spec == expected and same.dataset_id == job.dataset_id
    jobs.stop(control, same.id, save=False)
    changes = {"lora": {"rank": 8}, "max_steps": 9, "adapter_name": "mate"}
    other, _ = jobs.clone(control, job.id, changes, None)
    assert (other.spec.lora.rank, other.spec.lora.alpha, other.spec.max_steps) == (8, job.spec.lora.alpha, 9)
    assert (other.spec.epochs, other.spec.learning_rate, other.adapter_name) == (None, 3e-4, "mate")
    preset, _ = jobs.clone(control, job.id, {"preset": "quick", "adapter_name": "cook"}, None)
    assert (preset.spec.epochs, preset.spec.patience) == (1.0, 0)


def test_a_clone_goes_on_from_the_version_that_the_old_job_did(
    control: Control, submit: Submit, tmp_path: Path
) -> None:
    adapters.upload(control, files.adapter(tmp_path / "one", rank=4), "captain", False)
    job = submit("mate", initial_adapter="captain")
    jobs.stop(control, job.id, save=False)
    adapters.upload(control, files.adapter(tmp_path / "two", rank=8), "captain", True)
    again, _ = jobs.clone(control, job.id, {}, None)
    assert (again.spec.initial_adapter, again.spec.lora.rank) == ("captain@1", 4)


def test_a_change_that_is_none_is_refused_by_name(control: Control, submit: Submit) -> None:
    job = submit()
    with pytest.raises(Invalid) as caught:
        jobs.clone(control, job.id, {"lora": {"rank": "many"}}, None)
    assert caught.value.param == "changes.lora.rank"
