"""Intervals add up without loss, and their percentiles are those of the raw values."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.link.messages import PlanView, Telemetry
from core.telemetry import interval as iv

PAIRS = st.lists(st.tuples(st.floats(0.01, 1e5), st.integers(1, 64)), max_size=60)


def message(**fields: object) -> Telemetry:
    base: dict[str, object] = {"engine_id": "e", "time": 100.0, "interval_s": 0.5, "plan": PlanView(policy="p")}
    return Telemetry(**{**base, **fields})  # type: ignore[arg-type]


def test_a_gap_weighs_as_many_tokens_as_saw_it() -> None:
    weighted = iv.Weighted.of([(10.0, 98), (500.0, 2)])
    assert weighted.quantile(0.5, 0.98, 0.99) == [10.0, 10.0, 500.0]


def test_without_values_there_are_no_percentiles() -> None:
    assert iv.Weighted.of([]).quantile(0.5, 0.99) == [None, None]
    assert iv.point(iv.of_message(message(), {None: 50.0})).attainment is None


@given(PAIRS.filter(bool), st.floats(0.01, 0.999))
def test_a_percentile_is_the_nearest_rank_of_the_repeated_values(pairs: list[tuple[float, int]], share: float) -> None:
    repeated = np.sort(np.repeat([value for value, _ in pairs], [weight for _, weight in pairs]))
    rank = max(int(np.ceil(share * len(repeated) * (1 - 1e-12))), 1)
    assert iv.Weighted.of(pairs).quantile(share) == [repeated[rank - 1]]


@given(st.lists(PAIRS, min_size=1, max_size=5))
def test_merged_intervals_have_the_percentiles_of_all_their_values(lists: list[list[tuple[float, int]]]) -> None:
    parts = [iv.of_message(message(itl=pairs, time=100.0 + i), {None: 20.0}) for i, pairs in enumerate(lists)]
    whole = iv.of_message(message(itl=[pair for pairs in lists for pair in pairs]), {None: 20.0})
    merged = iv.merge(parts)
    assert merged.itl.quantile(0.5, 0.99) == whole.itl.quantile(0.5, 0.99)
    assert (merged.judged, merged.attained) == (whole.judged, whole.attained)
    assert merged.end == parts[-1].end


def test_rates_are_of_the_whole_time_and_shares_are_weighted_by_it() -> None:
    short = iv.of_message(message(time=1.0, interval_s=0.5, decode_tokens=10, busy_share=1.0), {})
    long = iv.of_message(message(time=2.5, interval_s=1.5, decode_tokens=10, busy_share=0.0, running=3), {})
    point = iv.point(iv.merge([short, long]))
    assert point.decode_tokens_s == 10.0
    assert point.busy_share == 0.25
    assert point.running == 3
    assert point.time == datetime.fromtimestamp(0.5, UTC)


def test_power_is_the_mean_of_the_time_in_which_it_was_told() -> None:
    untold = iv.of_message(message(time=1.0, interval_s=8.0), {})
    low = iv.of_message(message(time=1.5, interval_s=0.5, power_w=200.0), {})
    high = iv.of_message(message(time=3.0, interval_s=1.5, power_w=600.0), {})
    assert iv.point(untold).power_w is None
    assert iv.point(iv.merge([untold, low, high])).power_w == 500.0
    assert iv.point(iv.unpack(iv.pack(low))).power_w == 200.0


def test_the_plans_means_are_per_decode_step() -> None:
    idle = iv.of_message(message(decode_steps=1, plan=PlanView(policy="p", after=9.0)), {})
    busy = iv.of_message(message(decode_steps=8, plan=PlanView(policy="p", layout="whole", after=0.0)), {})
    point = iv.point(iv.merge([idle, busy]))
    assert point.plan_after == 1.0
    assert point.plan == "p whole"


def test_attainment_is_by_the_target_in_force_when_the_gap_came() -> None:
    loose = iv.of_message(message(itl=[(30.0, 1)]), {None: 40.0})
    tight = iv.of_message(message(itl=[(30.0, 1)]), {None: 20.0})
    none = iv.of_message(message(itl=[(30.0, 8)]), {})
    assert iv.point(iv.merge([loose, tight, none])).attainment == 0.5


@given(PAIRS)
def test_packing_for_the_store_keeps_everything_to_float32(pairs: list[tuple[float, int]]) -> None:
    before = iv.of_message(message(itl=pairs, ttft_ms=[1.5], paused_reason="guard", kv_used=5), {None: 20.0})
    after = iv.unpack(iv.pack(before))
    assert np.allclose(after.itl.values, before.itl.values, rtol=1e-6)
    assert np.array_equal(after.itl.weights, before.itl.weights)
    assert (after.kv_used, after.paused_reason, after.end) == (5, "guard", 100.0)


@given(PAIRS.filter(bool))
def test_coarse_values_keep_three_digits_and_all_weight(pairs: list[tuple[float, int]]) -> None:
    fine = iv.of_message(message(itl=pairs), {})
    coarse = iv.coarsen(fine)
    assert coarse.itl.total == fine.itl.total
    assert coarse.itl.quantile(0.99)[0] == pytest.approx(fine.itl.quantile(0.99)[0], rel=5.1e-3)


def test_gaps_of_tenants_with_targets_of_their_own_are_judged_by_those() -> None:
    report = message(itl=[(30.0, 10)], tenant_itl={"acme": [(30.0, 4)], "batch": [(30.0, 2)], "gone": [(30.0, 1)]})
    interval = iv.of_message(report, {None: 40.0, "acme": 20.0, "batch": 100.0})
    assert interval.tenants == {"acme": (4.0, 0.0), "batch": (2.0, 2.0)}
    assert (interval.judged, interval.attained) == (10.0, 6.0)
    only = iv.of_message(report, {"acme": 20.0})
    assert (only.judged, only.attained) == (4.0, 0.0), "the others have no target"


def test_tenants_add_up_and_survive_the_store() -> None:
    one = iv.of_message(message(itl=[(30.0, 4)], tenant_itl={"acme": [(30.0, 4)]}), {"acme": 40.0})
    two = iv.of_message(message(itl=[(50.0, 4)], tenant_itl={"acme": [(50.0, 4)]}), {"acme": 40.0})
    merged = iv.unpack(iv.pack(iv.merge([one, two])))
    assert iv.point(merged).tenant_attainment == {"acme": 0.5}
