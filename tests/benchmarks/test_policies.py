"""Facts about the benchmark of the policies: how a cell is judged, and that the page shows what was measured."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from benchmarks.page import shown
from benchmarks.policies import verdict
from benchmarks.policy_bench import FILES, POLICIES, TARGETS, WINDOW_S, Pool, knobs_of, merit
from benchmarks.policy_page import PAGE, QUESTIONS, figures
from benchmarks.policy_questions import assumed
from benchmarks.record import RESULTS
from core.policy import bind
from core.simulate.command import machine
from core.simulate.profile import read_profile


def pool(gaps: list[float], tokens: float) -> Pool:
    found = np.array(gaps)
    return Pool(found, np.ones_like(found), found, found, (tokens, tokens), 100.0, 0, 1, 0, 0.0)


def row(policy: str, tokens: float, holds: bool = True, x: float = 2.0) -> dict[str, object]:
    return {
        "trace": "t", "device": "d", "target_x": x, "policy": policy, "finetune_tokens_s": tokens, "holds": holds,
        "attainment": 0.999 if holds else 0.9,
    }  # fmt: skip


def test_a_setting_that_holds_beats_a_faster_one_that_does_not() -> None:
    slow, fast = pool([1.0] * 100, 10.0), pool([1.0] * 98 + [5.0] * 2, 90.0)
    assert slow.holds(2.0)
    assert not fast.holds(2.0)
    assert max([slow, fast], key=lambda one: merit(one, 2.0)) is slow
    assert max([slow, pool([1.0] * 100, 20.0)], key=lambda one: merit(one, 2.0)).mean_tokens_s == 20.0


def test_where_nothing_holds_attainment_decides() -> None:
    worse, better = pool([5.0] * 90 + [1.0] * 10, 90.0), pool([5.0] * 50 + [1.0] * 50, 10.0)
    assert max([worse, better], key=lambda one: merit(one, 2.0)) is better


def test_hybrid_is_compared_with_the_best_other_that_holds() -> None:
    rows = [row("solo", 0), row("harli", 100), row("static", 120, holds=False), row("hybrid", 96)]
    found = verdict(rows)
    (below,) = found["below_97_percent"]
    assert (below["rival"], below["ratio"]) == ("harli", 0.96)
    assert found["target_not_held_though_solo_does"] == []


def test_a_target_that_only_hybrid_misses_is_told() -> None:
    found = verdict([row("solo", 0), row("harli", 90), row("hybrid", 100, holds=False)])
    assert len(found["target_not_held_though_solo_does"]) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_every_setting_that_is_swept_exists(policy: str) -> None:
    for knobs in knobs_of(policy, machine("h200").device):
        bind(policy, **knobs)


def test_assumed_curves_keep_the_whole_device_and_change_its_parts() -> None:
    ada, like = read_profile("ada6000"), read_profile("h200")
    free = assumed(ada, like, "linear", slowed=False, slower=2.0)
    assert free.tasklets.forward_ms[0] == pytest.approx(2 * ada.tasklets.forward_ms[0])
    for was, now in zip(ada.layouts[1:], free.layouts[1:], strict=True):
        assert now.speed is not None
        assert was.speed is not None
        assert now.speed.base == pytest.approx(now.alone_speed)
        assert now.speed.base > was.speed.base


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    body: dict[str, Any] = json.loads((RESULTS / "policies.json").read_text())
    return body


def test_the_page_shows_the_recorded_results(recorded: dict[str, Any]) -> None:
    for name, text in figures(recorded).items():
        assert shown(PAGE, name) == text, name


def test_recorded_rows_have_the_agreed_fields_and_there_is_one_of_every_cell(recorded: dict[str, Any]) -> None:
    fields = {
        "trace", "device", "policy", "target_x", "tpot_p99_ms", "attainment", "finetune_tokens_s", "exclusive_share"
    }  # fmt: skip
    cells = {(row["trace"], row["device"], row["policy"], row["target_x"]) for row in recorded["rows"]}
    assert len(cells) == len(recorded["rows"]) == len(FILES) * len(WINDOW_S) * len(POLICIES) * len(TARGETS)
    assert all(fields <= set(row) for row in recorded["rows"])


def test_every_part_is_recorded_with_its_origin_and_without_the_machines_folders(recorded: dict[str, Any]) -> None:
    parts = [recorded[part]["made"] for part in ("probe", "measured", "speed", "table", "headline", "questions")]
    for made in [recorded, *parts]:
        assert {"machine", "versions", "date", "command"} <= set(made)
        assert "/" not in made["command"]
    assert set(QUESTIONS) <= set(recorded["questions"])


def test_an_hour_of_a_trace_takes_less_than_a_minute(recorded: dict[str, Any]) -> None:
    for policy in ("solo", "hybrid"):
        assert recorded["speed"][policy]["simulated_s"] >= 3000
        assert recorded["speed"][policy]["cpu_s"] < 60


def test_the_simulator_is_within_15_percent_of_every_row_of_the_probe(recorded: dict[str, Any]) -> None:
    assert recorded["probe"]["within_15_percent"] == recorded["probe"]["rows"] == 92


def test_the_papers_claim_stands_next_to_ours(recorded: dict[str, Any]) -> None:
    assert recorded["headline"]["paper"] == {"average": 0.462, "best": 0.92}
    text = PAGE.read_text()
    assert "46.2 %" in text and "92.0 %" in text
