"""Charts' options: what is drawn, of which points, on which axes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from app.ui import charts
from app.ui.theme import Colours
from core.api.schemas import JobMetric, Memory, MemoryOwner, TelemetryPoint

PALETTE = Colours("#1", "#2", "#3", "#4", "#5", "#6", ())
START = datetime(2026, 1, 1, tzinfo=UTC)


def point(second: int, **figures: Any) -> TelemetryPoint:
    return TelemetryPoint(time=START + timedelta(seconds=second), interval_s=1, **figures)


def metric(step: int, loss: float | None = None, **figures: Any) -> JobMetric:
    return JobMetric(step=step, time=START + timedelta(seconds=step), loss=loss, **figures)


def series(option: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in option["series"] if each["name"] == name)
    return found


def test_a_second_without_tokens_is_a_gap_in_the_line() -> None:
    option = charts.latency([point(0, itl_p50_ms=20.0), point(1), point(2, itl_p50_ms=21.0)], 60, PALETTE, None)
    assert [y for _, y in series(option, "p50")["data"]] == [20.0, None, 21.0]
    assert series(option, "p50")["connectNulls"] is False


def test_the_time_axis_is_the_window_up_to_the_newest_point() -> None:
    option = charts.throughput([point(0), point(5)], 60, PALETTE)
    end = (START + timedelta(seconds=5)).timestamp() * 1000
    assert (option["xAxis"]["min"], option["xAxis"]["max"]) == (end - 60_000, end)


def test_the_target_is_drawn_across_the_window() -> None:
    option = charts.latency([point(0, itl_p99_ms=30.0)], 60, PALETTE, 62.0)
    assert [y for _, y in series(option, "target 62 ms")["data"]] == [62.0, 62.0]
    assert len(charts.latency([point(0)], 60, PALETTE, None)["series"]) == 2


def test_stalls_are_not_in_the_latency_chart() -> None:
    points = [point(0, itl_p99_ms=30.0, stall_p99_ms=400.0)]
    assert 400.0 not in [y for each in charts.latency(points, 60, PALETTE, None)["series"] for _, y in each["data"]]
    assert [y for _, y in series(charts.stalls(points, 60, PALETTE), "stalls p99")["data"]] == [400.0]


def test_device_use_is_split_and_adds_up() -> None:
    option = charts.device([point(0, decode_share=0.5, finetune_share=0.4, busy_share=0.7)], 60, PALETTE)
    stacked = [each for each in option["series"] if each.get("stack") == "busy"]
    assert [each["data"][0][1] for each in stacked] == [50.0, 40.0]
    assert series(option, "in use")["data"][0][1] == 70.0


def test_kv_cache_without_a_size_is_not_drawn() -> None:
    assert charts.kv_cache([point(0)], 60, PALETTE)["series"][0]["data"][0][1] is None


def arena(capacity: int, kv: int, job: int) -> Memory:
    owners = [
        MemoryOwner(name=name, bytes=held, high_water_bytes=held) for name, held in (("kv cache", kv), ("job 1", job))
    ]
    sizes = {"page_bytes": 2**21, "capacity_bytes": capacity, "used_bytes": kv + job, "high_water_bytes": capacity}
    return Memory(**sizes, kept_bytes=0, kv_tokens=1, kv_most_tokens=1, owners=owners)


@pytest.mark.parametrize(("unit", "size"), [("MiB", 2**20), ("GiB", 2**30)])
def test_the_map_of_memory_ends_at_all_of_it_in_a_unit_that_suits(unit: str, size: int) -> None:
    points = [point(0, memory=arena(100 * size, 60 * size, 30 * size))]
    assert charts.memory_unit(points) == (unit, size)
    option = charts.memory(points, 60, PALETTE)
    assert [series(option, name)["data"][0][1] for name in ("KV cache", "finetuning")] == [60.0, 30.0]
    assert option["yAxis"]["max"] == 100.0


def test_charts_of_nothing_have_axes() -> None:
    for make in (charts.throughput, charts.device, charts.stalls, charts.load, charts.kv_cache, charts.memory):
        assert make([], 60, PALETTE)["xAxis"]["type"] == "time"


def test_the_average_begins_at_the_first_value() -> None:
    assert charts.smoothed([3.0]) == pytest.approx([3.0])
    assert charts.smoothed([2.0] * 50) == pytest.approx([2.0] * 50)
    assert charts.smoothed([]) == []


def test_loss_and_evaluation_share_the_axis_of_steps() -> None:
    option = charts.loss([metric(1, 3.0), metric(2, 2.0, eval_loss=2.5), metric(3, eval_loss=2.4)], 10, PALETTE)
    assert series(option, "loss per step")["data"] == [[1, 3.0], [2, 2.0]]
    assert series(option, "evaluation")["data"] == [[2, 2.5], [3, 2.4]]
    assert option["xAxis"]["max"] == 10


def test_without_evaluations_there_is_no_such_line() -> None:
    assert [each["name"] for each in charts.loss([metric(1, 3.0)], None, PALETTE)["series"]] == [
        "loss per step",
        "average of 10 steps",
    ]


def test_a_long_job_is_thinned_to_its_ends() -> None:
    pairs: list[list[float | None]] = [[step, 1.0] for step in range(10_001)]
    kept = charts.thinned(pairs, 1000)
    assert len(kept) <= 1001
    assert (kept[0], kept[-1]) == (pairs[0], pairs[-1])
    assert charts.thinned(pairs[:1000], 1000) == pairs[:1000]
