"""Facts about all policies in the simulator, which refuses plans that cannot be carried out."""

from __future__ import annotations

import pytest

from core.policy import POLICIES, bind
from core.simulate.command import machine
from core.simulate.engine import Simulation
from core.simulate.outcome import Outcome
from core.simulate.scenario import FinetuneJob, Scenario
from core.workload.arrivals import Arrival
from core.workload.traces import synthetic

SECONDS = 12.0
TRACE = synthetic(4.0, SECONDS, 800, 120, seed=11)
TENANTS = (
    FinetuneJob("a", "one", tokens=20_000),
    FinetuneJob("b", "two", weight=2.0),
    FinetuneJob("c", "two", priority=1, arrival_s=4.0, deadline_s=9.0),
)


def run(name: str, device: str, target_ms: float, arrivals: list[Arrival] = TRACE, **more: object) -> Outcome:
    on = machine(device)
    scenario = Scenario(arrivals, SECONDS, target_ms, **more)  # type: ignore[arg-type]
    return Simulation(scenario, on.device, bind(name), on.predictor()).run()


@pytest.mark.parametrize("name", list(POLICIES))
@pytest.mark.parametrize(("device", "target_ms"), [("h200", 9.0), ("h200", 30.0), ("ada6000", 32.0), ("a100", 25.0)])
def test_every_plan_can_be_carried_out(name: str, device: str, target_ms: float) -> None:
    outcome = run(name, device, target_ms)
    assert outcome.arrived == len(outcome.finished) + outcome.running + outcome.waiting
    assert 0 <= outcome.summary().exclusive_share <= 1.02


@pytest.mark.parametrize("name", list(POLICIES))
def test_several_tenants_take_turns(name: str) -> None:
    outcome = run(name, "h200", 20.0, jobs=TENANTS)
    runs = {r.job.job_id: r.trained_tokens + r.work_ms for r in (*outcome.trainer.runs, *outcome.trainer.done)}
    if name not in ("solo", "step_slices"):
        assert runs["a"] > 0
        assert runs["b"] + runs["c"] > 0


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "solo"])
def test_memory_that_decode_needs_stops_finetuning_and_not_decode(name: str) -> None:
    crowd = [Arrival(0.1 * n, 6000, 400) for n in range(40)]
    outcome = run(name, "ada6000", 60.0, crowd)
    assert outcome.summary().decode_tokens_s >= 0.5 * run("solo", "ada6000", 60.0, crowd).summary().decode_tokens_s


@pytest.mark.parametrize("name", ["tasklet_slices", "harli", "hybrid"])
def test_those_that_plan_by_prediction_hold_twice_solos_latency(name: str) -> None:
    solo = run("solo", "h200", 1e6).summary()
    summary = run(name, "h200", 2 * solo.itl_p99_ms).summary()
    assert summary.attainment >= 0.99
    assert summary.tpot_p99_ms <= 2 * solo.itl_p99_ms
    assert summary.exclusive_share > 0.4


def test_a_slower_device_is_noticed_and_the_target_held_again() -> None:
    outcome = run("hybrid", "h200", 16.0, drift=((6.0, 1.2),))
    late = [gap > 16.0 for end, gap in zip(outcome.steps.end_ms, outcome.steps.gap_ms, strict=True) if end > 9_000]
    assert sum(late) / len(late) < 0.02
