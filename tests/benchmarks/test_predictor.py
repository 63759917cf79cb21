"""Facts about the benchmark of the predictor: what is recorded meets the bars, and the page shows it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.page import shown
from benchmarks.predictor import PARTS, Watched, run
from benchmarks.predictor_page import PAGE, figures
from benchmarks.record import RESULTS
from core.simulate.command import machine
from core.workload.arrivals import Arrival


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    body: dict[str, Any] = json.loads((RESULTS / "predictor.json").read_text())
    return body


def test_the_recorded_figures_meet_their_bars(recorded: dict[str, Any]) -> None:
    assert recorded["median_error"] < 0.03
    assert recorded["p99_error"] < 0.08
    assert len(recorded["fit"]["two_stage"]["of_seeds"]) == 5
    assert recorded["stable"]["steps"] == 100_000
    assert 0.005 <= recorded["miss_rate"] <= 0.015
    assert recorded["recovery_steps"] <= 200
    assert recorded["plan_us"] < 20


def test_every_part_is_recorded_with_its_origin_and_without_the_machines_folders(recorded: dict[str, Any]) -> None:
    for made in [recorded, *(recorded[part]["made"] for part in PARTS)]:
        assert {"machine", "versions", "date", "command"} <= set(made)
        assert "/" not in made["command"]


def test_the_page_shows_the_recorded_results(recorded: dict[str, Any]) -> None:
    for name, text in figures(recorded).items():
        assert shown(PAGE, name) == text, name


def test_predictors_are_compared_on_stable_and_on_broken_conditions(recorded: dict[str, Any]) -> None:
    rows = [row for row in recorded["broken"]["rows"] if "condition" in row]
    conditions, predictors = {row["condition"] for row in rows}, {row["predictor"] for row in rows}
    assert "stable" in conditions and len(conditions) >= 5
    assert len(rows) == len(conditions) * len(predictors) == len(conditions) * 3
    assert all({"miss_rate", "width", "finetune_tokens_s"} <= set(row) for row in rows)


@pytest.mark.parametrize("learns", [True, False])
def test_a_policy_gets_all_it_asks_of_a_watched_predictor(learns: bool) -> None:
    watched = Watched(machine("h200").predictor(), learns=learns)
    steps = run([Arrival(0.05 * n, 256, 64) for n in range(20)], 2.0, watched).steps
    assert sum(steps.beside) + sum(steps.after) > 0
    assert watched.bound_over_step and min(watched.bound_over_step) > 0.8
