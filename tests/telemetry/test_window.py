"""The last minutes, and whole seconds."""

from __future__ import annotations

import pytest

from core.telemetry import interval as iv
from core.telemetry.window import KEPT_S, Seconds, Window
from tests.telemetry.test_interval import message


def interval(end: float, gap_ms: float = 10.0) -> iv.Interval:
    return iv.of_message(message(time=end, itl=[(gap_ms, 1)]), {})


def test_the_window_is_what_ended_in_the_last_seconds() -> None:
    now = 0.0
    window = Window(lambda: now)
    for now, age, gap in ((100.0, 0.0, 900.0), (159.0, 70.0, 800.0), (159.0, 0.5, 20.0), (160.0, 0.0, 30.0)):
        window.add(interval(now - age, gap), age)
    last = window.last(60)
    assert last is not None and sorted(last.itl.values) == [20.0, 30.0]


@pytest.mark.parametrize("by_s", [-3600.0, 3600.0])
def test_nothing_of_it_is_lost_and_nothing_stays_when_the_clock_is_set(by_s: float) -> None:
    now = 0.0
    window = Window(lambda: now)
    for now, by in ((100.0, 0.0), (101.0, by_s), (102.0, by_s)):
        window.add(interval(1e9 + now + by))
    seen = [window.last(seconds) for seconds in (60, 2, 0.5)]
    assert [last.itl.total if last is not None else 0 for last in seen] == [3, 2, 1]
    now = 162.5
    assert window.last(60) is None


def test_a_window_without_reports_is_none() -> None:
    now = 10.0
    window = Window(lambda: now)
    assert window.last(60) is None
    window.add(interval(10.0))
    now = 100.0
    assert window.last(60) is None


def test_old_intervals_are_forgotten() -> None:
    now = 0.0
    window = Window(lambda: now)
    window.add(interval(0.0))
    now = KEPT_S + 1
    window.add(interval(now))
    last = window.last(1e9)
    assert last is not None and last.itl.total == 1


def test_a_second_is_done_when_a_later_report_comes() -> None:
    seconds = Seconds()
    assert seconds.add(interval(10.2)) is None
    assert seconds.add(interval(10.7)) is None
    done = seconds.add(interval(11.2))
    assert done is not None and done[0] == 10 and done[1].itl.total == 2
    rest = seconds.flush()
    assert rest is not None and rest[0] == 11
    assert seconds.flush() is None


def test_a_report_that_comes_late_counts_for_the_second_that_is_open() -> None:
    seconds = Seconds()
    seconds.add(interval(11.0))
    assert seconds.add(interval(9.0)) is None
    done = seconds.add(interval(12.0))
    assert done is not None and done[0] == 11 and done[1].itl.total == 2


def test_seconds_go_on_when_the_clock_is_set_back() -> None:
    seconds = Seconds()
    assert seconds.add(interval(3610.2)) is None
    before = seconds.add(interval(10.4))
    assert before is not None and before[0] == 3610
    assert seconds.add(interval(10.9)) is None
    done = seconds.add(interval(11.4))
    assert done is not None and done[0] == 10 and done[1].itl.total == 2
