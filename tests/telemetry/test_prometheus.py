"""The exposition parses, and its histograms can tell milliseconds apart."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from core.link.messages import MemoryOwner, MemoryView
from core.telemetry import interval as iv
from core.telemetry.prometheus import Totals, render
from tests.telemetry.test_interval import message


def samples(totals: Totals) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = render(
        totals,
        jobs={"queued": 2},
        targets=[("itl", 0.99, "", 45.0), ("itl", 0.99, "acme", 30.0)],
        alerts={"critical": 1},
        parts=[("engine", "backing_off", 3)],
        engine_ready=True,
        dispatcher=False,
    )
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_counters_grow_and_gauges_show_the_last() -> None:
    totals = Totals()
    totals.add(iv.of_message(message(decode_tokens=5, running=1), {None: 20.0}))
    totals.add(iv.of_message(message(decode_tokens=7, running=4, itl=[(10.0, 3), (30.0, 1)]), {None: 20.0}))
    found = samples(totals)
    assert found["harli_decode_tokens_total", ()] == 12
    assert found["harli_running_requests", ()] == 4
    assert found["harli_itl_target_tokens_total", ()] == 4
    assert found["harli_itl_target_attained_tokens_total", ()] == 3


def test_power_and_energy_are_those_of_the_gpu_and_absent_without_one() -> None:
    totals = Totals()
    totals.add(iv.of_message(message(interval_s=0.5), {}))
    assert not [name for name, _ in samples(totals) if name.startswith("harli_gpu")]
    for watts in (300.0, 500.0):
        totals.add(iv.of_message(message(interval_s=0.5, power_w=watts), {}))
    found = samples(totals)
    assert (found["harli_gpu_power_watts", ()], found["harli_gpu_energy_joules_total", ()]) == (500, 400)
    totals.add(iv.of_message(message(interval_s=0.5), {}))
    found = samples(totals)
    assert ("harli_gpu_power_watts", ()) not in found, "the last report did not tell it"
    assert found["harli_gpu_energy_joules_total", ()] == 400


def test_the_arena_is_shown_by_who_holds_it() -> None:
    view = MemoryView(
        page_bytes=1, capacity_bytes=100, used_bytes=90, high_water_bytes=100, kept_bytes=0, kv_tokens=6,
        kv_most_tokens=8, owners=(MemoryOwner("kv cache", 60, 100), MemoryOwner("job a", 30, 40)),
    )  # fmt: skip
    totals = Totals()
    totals.add(iv.unpack(iv.pack(iv.of_message(message(memory=view), {}))))
    found = samples(totals)
    held = {dict(labels)["holder"]: value for (name, labels), value in found.items() if name == "harli_arena_bytes"}
    assert held == {"kv_cache": 60, "finetuning": 30, "free": 10}


def test_gaps_below_ten_milliseconds_fall_into_buckets_of_their_own() -> None:
    totals = Totals()
    totals.add(iv.of_message(message(itl=[(2.0, 10), (4.0, 20), (8.0, 30)]), {}))
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
    everyones, own = (
        found["harli_target_seconds", (("kind", "itl"), ("quantile", "0.99"), ("tenant", tenant))]
        for tenant in ("", "acme")
    )
    assert (everyones, own) == (0.045, 0.03)
    assert found["harli_alerts_firing", (("severity", "critical"),)] == 1
    assert found["harli_part_ready", (("part", "engine"),)] == 0
    assert found["harli_part_restarts_total", (("part", "engine"),)] == 3
    assert found["harli_engine_ready", ()] == 1
    assert found["harli_dispatcher", ()] == 0


def test_a_tenants_attainment_is_counted_by_its_own_target() -> None:
    totals = Totals()
    report = message(itl=[(10.0, 3), (30.0, 5)], tenant_itl={"acme": [(30.0, 4)]})
    totals.add(iv.of_message(report, {None: 20.0, "acme": 40.0}))
    found = samples(totals)
    assert found["harli_tenant_itl_target_tokens_total", (("tenant", "acme"),)] == 4
    assert found["harli_tenant_itl_target_attained_tokens_total", (("tenant", "acme"),)] == 4
    assert found["harli_itl_target_tokens_total", ()] == 8
    assert found["harli_itl_target_attained_tokens_total", ()] == 7, "three of everyone's four, and acme's four"


def test_the_guards_time_is_counted() -> None:
    totals = Totals()
    totals.add(iv.of_message(message(guard_pauses=2, guarded_s=0.4), {}))
    assert samples(totals)["harli_guard_pauses_total", ()] == 2
    assert samples(totals)["harli_guarded_seconds_total", ()] == 0.4


def test_the_time_to_the_first_token_is_in_no_histogram_of_gaps() -> None:
    totals = Totals()
    totals.add(iv.of_message(message(ttft_ms=[600.0], itl=[(20.0, 4)]), {}))
    found = samples(totals)
    assert found["harli_ttft_seconds_count", ()] == 1
    assert found["harli_itl_seconds_count", ()] == 4
    assert found["harli_itl_seconds_sum", ()] == 0.08
