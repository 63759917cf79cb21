"""What the simulator is asked for the live frontier."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from core.api import schemas
from core.control import frontier, targets
from core.control.context import Control
from core.predictor.profile import write_profile
from core.simulate.command import machine
from core.simulate.worker import Question
from core.telemetry import interval as iv
from db.base import now
from db.engines import EngineRecord
from tests.telemetry.test_interval import message

pytestmark = pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)

LEARNT = {
    "time": 1_780_000_000.0,
    "steps": [[3, 20.123, 24.9]],
    "tasklets": {"forward": [5.04, 6.0], "head": [9.0, 10.0], "backward": [8.0, 9.0], "optimizer": [4.0, 5.0]},
    "mix": {"forward": 4.0, "head": 1.0, "backward": 4.0, "optimizer": 1.0},
    "step_tokens": 256.0,
}


def engine(control: Control, folder: Path, learnt: object = None, **hello: object) -> None:
    """An engine on an H200 with a model in that folder, which decodes three requests."""
    said = {
        "device_name": "NVIDIA H200", "model": "llama", "dtype": "bfloat16", "model_path": str(folder),
        "policy": "hybrid", "margin": 0.1, "solo_itl_ms": 7.0, **hello,
    }  # fmt: skip
    with control.store.write() as session:
        session.add(EngineRecord(id="e", state="ready", hello=said, since=now(), state_since=now(), learnt=learnt))
    report = message(time=now().timestamp(), decode_steps=10, decode_tokens=30, running=3, kv_used=1234)
    control.window.add(iv.of_message(report, {}))


def put_target(control: Control, **fields: object) -> None:
    body = {"version": 0, "targets": [{"kind": "itl", "ms": 20.0, **fields}]}
    targets.put(control, schemas.TargetsUpdate.model_validate(body))


def test_without_an_engine_there_is_nothing_to_ask(control: Control) -> None:
    asked = frontier.ask(control)
    assert (asked.question, asked.empty.source) == (None, "none")
    assert asked.empty.missing == "no engine is connected"


def test_an_engine_that_knows_nothing_of_itself_yet_is_not_guessed_at(control: Control, tmp_path: Path) -> None:
    engine(control, tmp_path)
    asked = frontier.ask(control)
    assert asked.question is None
    assert "no finetune job has run long enough" in (asked.empty.missing or "")


def test_the_question_is_about_the_present_load_and_target(control: Control, tmp_path: Path) -> None:
    engine(control, tmp_path, LEARNT)
    put_target(control)
    asked = frontier.ask(control)
    assert asked.question is not None
    question = Question.model_validate(asked.question)
    assert (question.batch, question.kv_tokens, question.now_ms) == (3, 1200, 20.0)
    assert (question.policy, question.margin) == ("hybrid", 0.1)
    assert question.steps == [(3, 20.0, 25.0)], "to two digits, so that a steady load keeps its answer"
    assert (question.targets_ms[0], question.targets_ms[-1]) == (6.3, 56.0)
    assert asked.empty.source == "learnt"


def test_a_tenants_target_is_not_the_operating_point(control: Control, tmp_path: Path) -> None:
    engine(control, tmp_path, LEARNT)
    put_target(control, tenant="default")
    asked = frontier.ask(control)
    assert asked.question is not None and asked.question["now_ms"] is None


def test_a_profile_of_the_machine_goes_before_what_was_learnt(control: Control, tmp_path: Path) -> None:
    config = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    profile = machine("h200").profile
    other = profile.machine.model_copy(update={"model": "another"})
    write_profile(profile.model_copy(update={"machine": other}), control.data_dir / "profiles")
    engine(control, tmp_path, LEARNT, model=profile.machine.model)
    assert frontier.ask(control).empty.source == "learnt", "a profile of another model is none"
    path = write_profile(profile, control.data_dir / "profiles")
    asked = frontier.ask(control)
    assert asked.question is not None
    question = Question.model_validate(asked.question)
    assert (question.profile, question.layers, question.kv_bytes_per_token) == (str(path), 32, 131_072)
    assert asked.empty.source == "profile"
