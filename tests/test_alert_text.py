"""What alert rules are called, with units."""

from __future__ import annotations

from typing import get_args

import pytest

from core import alert_text
from core.api.schemas import AlertMetric, AlertRuleBody


def rule(metric: AlertMetric, comparison: str, threshold: float) -> AlertRuleBody:
    return AlertRuleBody.model_validate({"metric": metric, "comparison": comparison, "threshold": threshold})


@pytest.mark.parametrize(
    ("metric", "comparison", "threshold", "value", "condition", "finding"),
    [
        ("itl_p99_ms", "above", 80, 91.234, "the p99 ITL above 80 ms", "the p99 ITL is 91.23 ms, above 80 ms"),
        ("attainment", "below", 0.99, 0.9731, "the share of gaps within the ITL target below 99 %",
         "the share of gaps within the ITL target is 97.31 %, below 99 %"),
        ("longest_wait_s", "above", 3600, 86_400.4, "the longest wait of a queued job above 3,600 s",
         "the longest wait of a queued job is 86,400 s, above 3,600 s"),
        ("queued_jobs", "above", 20, 23, "the number of queued jobs above 20",
         "the number of queued jobs is 23, above 20"),
        ("engine_ready", "below", 1, 0, "the engine is not ready", "the engine is not ready"),
        ("engine_ready", "above", 0, 1, "the engine is ready", "the engine is ready"),
    ],
)  # fmt: skip
def test_conditions_and_findings_have_units(
    metric: AlertMetric, comparison: str, threshold: float, value: float, condition: str, finding: str
) -> None:
    asked = rule(metric, comparison, threshold)
    assert alert_text.condition(asked) == condition
    assert alert_text.finding(asked, value) == finding


def test_a_threshold_that_tells_no_readiness_apart_is_shown_as_it_is() -> None:
    assert alert_text.condition(rule("engine_ready", "below", 5)).endswith("below 5")


@pytest.mark.parametrize("metric", get_args(AlertMetric))
def test_every_figure_has_a_name(metric: AlertMetric) -> None:
    assert not alert_text.figure(metric).startswith("the ")
    assert "_" not in alert_text.figure(metric)
