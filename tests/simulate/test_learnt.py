"""A device made of what an engine without a profile has seen of itself, and the process that answers about it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from core.errors import Invalid
from core.simulate.command import Load, whatif
from core.simulate.learnt import Learnt, LearntMachine
from core.simulate.worker import Question, answer

STEPS = [(1, 30.0, 36.0), (4, 42.0, 50.0)]
TASKLETS = {"forward": (12.0, 14.0), "head": (40.0, 46.0), "backward": (20.0, 23.0), "optimizer": (15.0, 18.0)}
MIX = {"forward": 30.0, "head": 1.0, "backward": 30.0, "optimizer": 1.0}
LEARNT = Learnt("a CPU", "small", STEPS, TASKLETS, MIX, 256.0)  # type: ignore[arg-type]


def test_its_steps_and_its_throughput_are_those_that_were_measured() -> None:
    machine = LearntMachine(LEARNT, 4, 1200)
    found = whatif(Load(4, 1200), machine, (60.0, 120.0, 400.0), policy_name="tasklet_slices", now_ms=120.0)
    assert found.solo_ms == pytest.approx(42.0, rel=0.01)
    whole_step_ms = 30 * 12 + 40 + 30 * 20 + 15
    assert found.exclusive_tokens_s == pytest.approx(256 / whole_step_ms * 1e3, rel=0.01)
    tight, now, loose = (point.finetune_tokens_s for point in found.points)
    assert tight < now < loose < found.exclusive_tokens_s
    assert found.now == found.points[1]
    assert {point.layout for point in found.points} == {"whole"}


def test_a_batch_between_two_that_were_seen_lies_between_them() -> None:
    assert 30.0 < whatif(Load(2, 600), LearntMachine(LEARNT, 2, 600), (200.0,), policy_name="solo").solo_ms < 42.0


def test_the_margin_is_not_planned_with() -> None:
    machine = LearntMachine(LEARNT, 4, 1200)
    plain, careful = (
        whatif(Load(4, 1200), machine, (120.0,), policy_name="tasklet_slices", margin=margin).points[0]
        for margin in (0.0, 0.3)
    )
    assert careful.finetune_tokens_s < plain.finetune_tokens_s
    assert careful.itl_p99_ms < 120.0 * 0.75
    assert careful.attainment == 1.0


def test_a_long_optimizer_step_is_told_in_parts() -> None:
    long = Learnt("a CPU", "small", STEPS, TASKLETS, {k: 64 * n for k, n in MIX.items()}, 64 * 256.0)  # type: ignore[arg-type]
    machine = LearntMachine(long, 4, 1200)
    found = whatif(Load(4, 1200), machine, (400.0,), policy_name="tasklet_slices")
    assert found.exclusive_tokens_s == pytest.approx(256 / 1015 * 1e3, rel=0.05)


def test_what_has_not_been_seen_is_named() -> None:
    partial = Learnt("a CPU", "small", STEPS, {"forward": (12.0, 14.0)}, {"forward": 30.0}, 0.0)
    with pytest.raises(Invalid, match="has not run any head, backward, optimizer tasklets yet"):
        LearntMachine(partial, 1, 100)
    with pytest.raises(Invalid, match="decode steps"):
        LearntMachine(Learnt("a CPU", "small", [], TASKLETS, MIX, 256.0), 1, 100)  # type: ignore[arg-type]


QUESTION = {
    "batch": 4, "kv_tokens": 1200, "targets_ms": [120.0], "now_ms": None, "policy": "tasklet_slices", "margin": 0.15,
    "device": "a CPU", "model": "small", "steps": STEPS, "tasklets": TASKLETS, "mix": MIX, "step_tokens": 256.0,
}  # fmt: skip


def test_a_question_about_a_profile_is_about_its_device() -> None:
    asked = {**QUESTION, "profile": "h200", "batch": 32, "kv_tokens": 32 * 1024, "targets_ms": [12.0]}
    found = answer(Question.model_validate(asked))["frontier"]
    assert found["device"] == "NVIDIA H200"
    assert found["points"][0]["finetune_tokens_s"] > 0


def test_the_process_answers_line_by_line_and_tells_faults_as_such() -> None:
    lines = [QUESTION, {**QUESTION, "policy": "best"}, {**QUESTION, "colour": "red"}, QUESTION]
    done = subprocess.run(
        [sys.executable, "-m", "core.simulate.worker"],
        input="".join(json.dumps(line) + "\n" for line in lines),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    first, unknown, odd, again = (json.loads(line) for line in done.stdout.splitlines())
    assert first == again
    assert first["frontier"]["points"][0]["target_ms"] == 120.0
    assert (unknown["error"]["code"], odd["error"]["code"]) == ("no_policy", "question")
