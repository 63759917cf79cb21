"""When predictions are not trusted."""

from __future__ import annotations

from core.predictor.stale import MissWatch


def test_four_misses_in_twenty_steps_are_too_many() -> None:
    watch = MissWatch()
    seen = [watch.see(n in (0, 6, 12, 18)) for n in range(19)]
    assert seen.index(True) == 18 and "4 of the last 20" in watch.reason


def test_four_misses_spread_over_more_steps_are_not() -> None:
    watch = MissWatch()
    assert not any(watch.see(n % 7 == 0) for n in range(200))
    assert watch.reason == ""


def test_trust_returns_after_twenty_steps_in_a_row_that_held() -> None:
    watch = MissWatch()
    watch.distrust("clock changed")
    for _ in range(19):
        watch.see(False)
    watch.see(True)
    for _ in range(19):
        watch.see(False)
    assert watch.reason == "clock changed"
    watch.see(False)
    assert watch.reason == ""
