"""Latencies as requests see them."""

from __future__ import annotations

import pytest

from core.runtime.clock import StepClock


def test_ttft_is_no_gap_between_tokens() -> None:
    clock = StepClock()
    clock.prefill(1.0, [("a", 0.4)])
    clock.decode(1.1, [("a", False)])
    taken = clock.take()
    assert taken.ttft == pytest.approx([600.0])
    assert taken.itl == [(pytest.approx(100.0), 1)]


def test_a_gap_counts_once_for_each_request_that_saw_it() -> None:
    clock = StepClock()
    clock.prefill(0.0, [("a", 0.0), ("b", 0.0)])
    assert clock.decode(0.05, [("a", False), ("b", False)]) == pytest.approx(50.0)
    assert clock.take().itl == [(pytest.approx(50.0), 2)]


def test_a_gap_with_a_prefill_in_it_is_a_stall() -> None:
    clock = StepClock()
    clock.prefill(0.0, [("a", 0.0)])
    clock.prefill(0.3, [("b", 0.0)])
    assert clock.decode(0.35, [("a", False), ("b", False)]) == pytest.approx(50.0)
    taken = clock.take()
    assert taken.stalls == [(pytest.approx(350.0), 1)]
    assert taken.itl == [(pytest.approx(50.0), 1)]


def test_a_step_whose_result_waits_for_a_prefills_launch_is_a_stall_too() -> None:
    clock = StepClock()
    clock.prefill(0.0, [("a", 0.0)])
    clock.prefill_begins()  # launched behind the decode step that still runs
    clock.decode(0.05, [("a", False)])
    clock.prefill(0.1, [("b", 0.0)])
    clock.decode(0.11, [("a", False), ("b", False)])
    clock.decode(0.12, [("a", False), ("b", False)])
    taken = clock.take()
    assert taken.stalls == [(pytest.approx(50.0), 1), (pytest.approx(60.0), 1)]
    assert taken.itl == [(pytest.approx(10.0), 1), (pytest.approx(10.0), 2)]


def test_tpot_is_the_mean_gap_of_a_whole_request() -> None:
    clock = StepClock()
    clock.prefill(0.0, [("a", 0.0)])
    clock.decode(0.1, [("a", False)])
    clock.decode(0.4, [("a", True)])
    assert clock.take().tpot == pytest.approx([200.0])


def test_a_request_of_one_token_has_no_tpot() -> None:
    clock = StepClock()
    clock.prefill(0.0, [("a", 0.0)])
    clock.end("a")
    assert clock.take().tpot == []


def test_what_was_taken_is_not_told_twice() -> None:
    clock = StepClock()
    clock.prefill(0.0, [("a", 0.0)])
    clock.take()
    assert clock.take().ttft == []


def test_the_tpot_slack_is_what_the_slowest_request_has_left() -> None:
    clock = StepClock()
    clock.prefill(0.0, [("slow", 0.0)])
    clock.decode(0.19, [("slow", False)])
    clock.prefill(0.19, [("fresh", 0.1)])
    # slow: two tokens at 100 ms allow 200 ms in all, 190 are gone.
    assert clock.tpot_slack_ms(100.0, ["slow", "fresh"], now=0.19) == pytest.approx(10.0)
    assert clock.tpot_slack_ms(100.0, ["fresh"], now=0.19) == pytest.approx(100.0)


def test_no_request_gives_a_step_more_than_four_times_the_target() -> None:
    clock = StepClock()
    clock.prefill(0.0, [("a", 0.0)])
    for n in range(50):
        clock.decode(0.001 * n, [("a", False)])
    assert clock.tpot_slack_ms(100.0, ["a"], now=0.05) == 400.0


def test_aborted_requests_are_forgotten() -> None:
    clock = StepClock()
    clock.prefill(0.0, [("gone", 0.0), ("here", 0.0)])
    clock.keep(["here"])
    clock.decode(5.0, [("here", False)])
    clock.prefill(6.0, [("gone", 5.9)])
    clock.decode(6.1, [("gone", False)])
    assert max(gap for gap, _ in clock.take().itl) == pytest.approx(5000.0)
