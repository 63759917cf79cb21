"""The exposition parses, and its histograms can tell milliseconds apart."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from core.telemetry import interval as iv
from core.telemetry.prometheus import Totals, render
from tests.telemetry.test_interval import message


def samples(totals: Totals) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = render(totals, jobs={"queued": 2}, targets=[("itl", 0.99, 45.0)], engine_ready=True, dispatcher=False)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_counters_grow_and_gauges_show_the_last() -> None:
    totals = Totals()
    totals.add(iv.of_message(message(decode_tokens=5, running=1), 20.0))
    totals.add(iv.of_message(message(decode_tokens=7, running=4, itl=[(10.0, 3), (30.0, 1)]), 20.0))
    found = samples(totals)
    assert found["harli_decode_tokens_total", ()] == 12
    assert found["harli_running_requests", ()] == 4
    assert found["harli_itl_target_tokens_total", ()] == 4
    assert found["harli_itl_target_attained_tokens_total", ()] == 3


def test_gaps_below_ten_milliseconds_fall_into_buckets_of_their_own() -> None:
    totals = Totals()
    totals.add(iv.of_message(message(itl=[(2.0, 10), (4.0, 20), (8.0, 30)]), None))
    buckets = {
        float(dict(labels)["le"]): value
        for (name, labels), value in samples(totals).items()
        if name == "harli_itl_seconds_bucket"
    }
    assert max(value for bound, value in buckets.items() if bound < 0.003) == 10
    assert max(value for bound, value in buckets.items() if bound < 0.006) == 30
    assert buckets[float("inf")] == 60
    assert samples(totals)["harli_itl_seconds_sum", ()] == (2 * 10 + 4 * 20 + 8 * 30) / 1e3


def test_jobs_targets_and_roles_are_shown() -> None:
    found = samples(Totals())
    assert found["harli_jobs", (("state", "queued"),)] == 2
    assert found["harli_target_seconds", (("kind", "itl"), ("quantile", "0.99"))] == 0.045
    assert found["harli_engine_ready", ()] == 1
    assert found["harli_dispatcher", ()] == 0
