"""The report that stands still, and reading off the frontier."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from app.ui import frontier as reading_off
from app.ui import target_report
from core.api.schemas import Frontier, FrontierPoint, Notice, TargetInForce, Targets, TelemetryPoint

NOON = datetime(2026, 12, 1, 12, tzinfo=UTC)


def point(target_ms: float, tokens_s: float, layout: str = "whole") -> FrontierPoint:
    return FrontierPoint(
        target_ms=target_ms, finetune_tokens_s=tokens_s, exclusive_share=tokens_s / 1000, itl_p50_ms=target_ms / 2,
        itl_p99_ms=target_ms * 0.9, attainment=0.995, layout=layout,
    )  # fmt: skip


POINTS = [point(40, 0), point(60, 100), point(100, 300, "split(96, 36)")]


def test_between_two_points_the_frontier_is_linear() -> None:
    there = reading_off.at(POINTS, 90)
    assert (there.target_ms, there.finetune_tokens_s) == (90, pytest.approx(250))
    assert there.layout == "split(96, 36)", "that of the nearer point"
    assert reading_off.at(POINTS, 60) == POINTS[1]


@pytest.mark.parametrize(("target_ms", "tokens_s"), [(10, 0), (500, 300)])
def test_outside_of_the_points_the_nearest_end_counts(target_ms: float, tokens_s: float) -> None:
    there = reading_off.at(POINTS, target_ms)
    assert (there.target_ms, there.finetune_tokens_s) == (target_ms, tokens_s)


def test_the_report_holds_everything_in_the_viewers_zone_and_needs_nothing_else() -> None:
    in_force = [TargetInForce(kind="itl", ms=60, quantile=0.99, tenant="acme", reason="Mon–Fri <9–17>")]
    targets = Targets(version=2, targets=[], in_force=in_force, origin="set")
    found = Frontier(source="learnt", policy="hybrid", batch=4, kv_tokens=1200, points=POINTS, now=POINTS[1])
    past = [TelemetryPoint(time=NOON + timedelta(seconds=n), interval_s=1, itl_p99_ms=50.0) for n in range(3)]
    told = [Notice(id=1, time=NOON, level="warning", code="guard", message="finetuning paused: gaps over 60 ms")]
    page = target_report.html(targets, found, past, told, NOON, ZoneInfo("Europe/Berlin"))
    assert page.count("Plotly.newPlot") == 2
    assert "2026-12-01 13:00:00" in page
    assert "Mon–Fri &lt;9–17&gt;" in page
    assert "finetuning paused: gaps over 60 ms" in page
    assert '<script src="http' not in page


def test_without_figures_the_report_says_what_is_missing() -> None:
    nothing = Frontier(source="none", missing="no engine is connected")
    page = target_report.html(Targets(version=0, targets=[], origin="none"), nothing, [], [], NOON, UTC)
    assert "no engine is connected" in page
    assert "Plotly" not in page
