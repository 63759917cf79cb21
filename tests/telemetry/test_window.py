"""The last minutes, and whole seconds."""

from __future__ import annotations

from core.telemetry import interval as iv
from core.telemetry.window import KEPT_S, Seconds, Window
from tests.telemetry.test_interval import message


def interval(end: float, gap_ms: float = 10.0) -> iv.Interval:
    return iv.of_message(message(time=end, itl=[(gap_ms, 1)]), {})


def test_the_window_is_what_ended_in_the_last_seconds() -> None:
    window = Window()
    for end, gap in ((100.0, 900.0), (159.0, 20.0), (160.0, 30.0)):
        window.add(interval(end, gap))
    last = window.last(60, now=160.0)
    assert last is not None and sorted(last.itl.values) == [20.0, 30.0]


def test_a_window_without_reports_is_none() -> None:
    window = Window()
    assert window.last(60, now=10.0) is None
    window.add(interval(10.0))
    assert window.last(60, now=100.0) is None


def test_old_intervals_are_forgotten() -> None:
    window = Window()
    window.add(interval(0.0))
    window.add(interval(KEPT_S + 1))
    last = window.last(1e9, now=KEPT_S + 1)
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
