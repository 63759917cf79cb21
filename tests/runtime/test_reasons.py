"""Facts about what people see of a fallback: every reason goes from the policy through the telemetry to the console."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from core.api.schemas import TelemetryPoint
from core.link.messages import Telemetry
from core.predictor.two_stage import TwoStagePredictor
from core.runtime.gpu_watch import GpuWatch
from core.telemetry import interval
from tests.predictor import synthetic
from tests.runtime.test_gpu_watch import Nvml, clocked
from tests.runtime.test_runtime import Bench, bench, target

__all__ = ["bench"]


def point(bench: Bench, step: Callable[[], object]) -> TelemetryPoint:
    """What the console gets of the next report."""
    step()  # a report tells of the plan before it
    bench.drain()
    bench.pending.clear()
    bench.clock.now += 1.0
    told = bench.until(lambda message: isinstance(message, Telemetry), step)
    assert isinstance(told, Telemetry)
    return interval.point(interval.of_message(told, {}))


def running(bench: Bench) -> Bench:
    """With a job that runs, and steps that the predictor knows."""
    target(bench, 90.0)
    bench.start(max_steps=500)
    bench.update("started")
    for _ in range(60):
        bench.decode()
    return bench


def test_a_plan_tells_what_it_found_room_for(bench: Bench) -> None:
    found = point(running(bench), bench.decode)
    assert "ms of slack" in found.plan_reason
    assert found.paused_reason is None


def test_predictions_that_are_stale_are_told_with_how_many_bounds_were_missed(bench: Bench) -> None:
    running(bench)
    for step_s in (0.07, 0.12, 0.20, 0.35):  # each outlasts what the one before has taught
        bench.decode(step_s=step_s)
    assert bench.runtime._predictor.stale
    found = point(bench, bench.decode)
    assert found.paused_reason is not None and "outlasted their bound" in found.paused_reason
    assert found.plan_reason == found.paused_reason


def test_a_clock_that_changes_pauses_finetuning_until_what_was_fitted_holds_again(bench: Bench) -> None:
    driver = Nvml()
    watch = GpuWatch(0, driver)
    running(bench)
    bench.runtime._engine = replace(bench.runtime._engine, gpu=watch)
    bench.runtime._predictor = TwoStagePredictor(synthetic.profile())
    clocked(watch, driver, 1980, 1980, 1200, 1200)
    point(bench, bench.decode)  # looks at the clock
    found = point(bench, bench.decode)
    assert found.paused_reason == "the SMs' clock went from 1980 to 1200 MHz"


def test_finetuning_that_yields_to_a_prompt_says_so(bench: Bench) -> None:
    found = point(running(bench), lambda: bench.decode(waiting=300))
    assert found.paused_reason == "prefill waits"


@pytest.mark.parametrize("ms", [20.0, 45.0])
def test_a_target_without_room_is_told_with_slack_and_step(bench: Bench, ms: float) -> None:
    running(bench)
    target(bench, ms, version=2)
    bench.decode()
    found = point(bench, bench.decode)
    assert found.paused_reason is not None
    assert "no slack" in found.paused_reason or "guard" in found.paused_reason
