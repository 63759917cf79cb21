"""Which targets are in force at a moment: tenants, the days of the week, the clocks of a zone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.api.schemas import WEEKDAYS, TargetBody, TargetWindow
from core.control import schedule
from core.errors import Invalid

OFFICE = {"days": ["mon", "tue", "wed", "thu", "fri"], "start": "09:00", "end": "17:00", "zone": "Europe/Berlin"}
NIGHT = {"days": ["fri"], "start": "22:00", "end": "06:00", "zone": "Europe/Berlin"}
WEEKEND = {"days": ["sat", "sun"], "zone": "Europe/Berlin"}


def berlin(*when: int) -> datetime:
    return datetime(*when, tzinfo=ZoneInfo("Europe/Berlin"))  # type: ignore[misc]


def target(ms: float, *windows: dict[str, Any], **fields: Any) -> TargetBody:
    return TargetBody.model_validate({"kind": "itl", "ms": ms, "windows": list(windows), **fields})


def in_force(*targets: TargetBody, at: datetime) -> list[tuple[str | None, float]]:
    return [(one.tenant, one.ms) for one in schedule.in_force(targets, at)]


def test_an_open_window_goes_before_the_target_that_always_counts() -> None:
    targets = (target(60), target(150, OFFICE))
    assert in_force(*targets, at=berlin(2026, 12, 1, 8, 59)) == [(None, 60)]
    assert in_force(*targets, at=berlin(2026, 12, 1, 9, 0)) == [(None, 150)]
    assert in_force(*targets, at=berlin(2026, 12, 1, 17, 0)) == [(None, 60)]
    assert in_force(*targets, at=berlin(2026, 12, 5, 12, 0)) == [(None, 60)], "a Saturday"


def test_of_several_open_windows_the_tightest_counts() -> None:
    assert in_force(target(80, OFFICE), target(40, {"zone": "UTC"}), at=berlin(2026, 12, 1, 10)) == [(None, 40)]


def test_a_window_past_midnight_belongs_to_the_day_it_began() -> None:
    night = target(200, NIGHT)
    assert in_force(night, at=berlin(2026, 12, 4, 23)) == [(None, 200)]
    assert in_force(night, at=berlin(2026, 12, 5, 5, 59)) == [(None, 200)]
    assert in_force(night, at=berlin(2026, 12, 5, 6)) == []
    assert in_force(night, at=berlin(2026, 12, 4, 5)) == [], "Thursday's night has no window"


def test_tenants_kinds_and_quantiles_do_not_take_each_others_place() -> None:
    targets = (target(60), target(30, tenant="acme"), target(20, quantile=0.5), target(900, kind="ttft"))
    assert in_force(*targets, at=berlin(2026, 12, 1)) == [(None, 60), (None, 20), (None, 900), ("acme", 30)]


def test_it_is_said_why_and_until_when() -> None:
    targets = (target(60), target(150, OFFICE))
    (now,) = schedule.in_force(targets, berlin(2026, 12, 1, 10))
    assert (now.reason, now.until) == ("Mon–Fri 09:00–17:00 Europe/Berlin", berlin(2026, 12, 1, 17))
    (now,) = schedule.in_force(targets, berlin(2026, 12, 4, 18))
    assert (now.reason, now.until) == ("outside of its windows", berlin(2026, 12, 7, 9)), "over the weekend"
    (now,) = schedule.in_force((target(60),), berlin(2026, 12, 1))
    assert (now.reason, now.until) == ("always", None)


def test_clocks_that_are_changed_move_the_window_with_them() -> None:
    office = target(150, {**OFFICE, "days": ["mon"]})
    for month in (3, 4):  # the Mondays before and after the last Sunday of March
        monday = berlin(2026, 3, 23, 9) if month == 3 else berlin(2026, 3, 30, 9)
        assert in_force(office, at=monday) == [(None, 150)]
        assert in_force(office, at=monday - timedelta(minutes=1)) == []


def test_days_are_told_in_runs() -> None:
    window = TargetWindow.model_validate({"days": ["mon", "tue", "wed", "sat"], "start": "00:00", "end": "00:00"})
    assert schedule.describe(window) == "Mon–Wed, Sat all day UTC"
    assert schedule.describe(TargetWindow()) == "every day all day UTC"


def test_a_zone_that_does_not_exist_is_named() -> None:
    with pytest.raises(Invalid, match=r"targets\.0\.windows\.0\.zone is 'Europe/Atlantis'"):
        schedule.check_zone("Europe/Atlantis", "targets.0.windows.0.zone")
    with pytest.raises(Invalid):
        schedule.check_zone("../../etc/passwd", "zone")


CLOCKS = st.tuples(st.integers(0, 23), st.integers(0, 59)).map(lambda clock: f"{clock[0]:02}:{clock[1]:02}")
WINDOWS = st.builds(
    TargetWindow,
    days=st.lists(st.sampled_from(WEEKDAYS), min_size=1, max_size=7, unique=True),
    start=CLOCKS,
    end=CLOCKS,
    zone=st.sampled_from(["UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata", "Australia/Lord_Howe"]),
)
MOMENTS = st.datetimes(datetime(2026, 1, 1), datetime(2027, 1, 1)).map(lambda moment: moment.replace(tzinfo=UTC))


@given(st.lists(WINDOWS, min_size=1, max_size=3), MOMENTS)
def test_nothing_changes_before_the_moment_that_is_told(windows: list[TargetWindow], at: datetime) -> None:
    targets = (TargetBody(kind="itl", ms=60), TargetBody(kind="itl", ms=30, windows=windows))
    (now,) = schedule.in_force(targets, at)
    until = now.until or at + timedelta(days=7)
    for share in (0.25, 0.5, 0.99):
        (later,) = schedule.in_force(targets, at + (until - at) * share)
        assert later.ms == now.ms
