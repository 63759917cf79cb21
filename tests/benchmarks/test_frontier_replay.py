"""Facts about the frontier's replay: what a recording says of its steps, what the simulator makes of it, and that
hybrid keeps what it has on an H200's steps."""

from __future__ import annotations

import pytest

from benchmarks.frontier_page import GOALS
from benchmarks.frontier_replay import RecordedDevice, Recording, Replay, recordings, summary
from benchmarks.policy_measured import layout_of
from benchmarks.record import RESULTS
from core.policy.types import WHOLE, Layout
from core.simulate.command import machine

RUN = "frontier"
SPLIT = Layout("split", 64, 68)


def test_a_layout_is_read_as_it_is_written() -> None:
    for layout in (WHOLE, SPLIT, Layout("confined", 0, 36)):
        assert layout_of(str(layout)) == layout


def test_a_gap_deviates_from_the_trend_of_its_point_and_not_from_its_mean() -> None:
    gaps = [10.0 + 0.01 * n for n in range(200)]
    gaps[70] *= 1.2
    ends, ratios = Recording(32, WHOLE, False, tuple(gaps)).deviations()
    assert ratios[70] == pytest.approx(1.2, rel=1e-3)
    assert [ratios[n] for n in (0, 69, 199)] == pytest.approx([1.0] * 3, rel=1e-3)
    assert ends[70] == pytest.approx(sum(gaps[:71]))


def test_a_step_takes_what_the_recorded_one_took_as_long_after_the_beginning() -> None:
    steady = machine("h200").device
    slow = [10.0] * 60 + [12.0] * 8 + [10.0] * 132
    plain = Recording(32, WHOLE, False, (10.0,) * 200)
    device = RecordedDevice(steady, [plain, Recording(32, SPLIT, True, tuple(slow))])
    size = (32, 32 * 600, 600)
    usual = steady.cell(SPLIT, *size)
    for start_ms, ratio in ((100.0, 1.0), (640.0, 1.2), (800.0, 1.0), (50_000.0, 1.0)):
        cell = device.step(start_ms, SPLIT, *size)
        assert cell.beside_ms == pytest.approx(usual.beside_ms * ratio)
        assert cell.alone_ms == pytest.approx(usual.alone_ms), "that was not recorded: as the whole device"


def test_a_run_kept_the_gaps_of_all_its_points_of_one_layout() -> None:
    known = {(one.batch, one.layout, one.busy) for one in recordings(RESULTS / f"{RUN}_gaps.jsonl")}
    assert {(32, WHOLE, False), (128, SPLIT, True), (32, Layout("confined", 0, 20), True)} <= known
    assert all(len(one.gaps_ms) > 100 for one in recordings(RESULTS / f"{RUN}_gaps.jsonl"))


def test_hybrid_reaches_the_goals_on_the_steps_of_an_h200() -> None:
    rows = summary(Replay(RUN), ["hybrid"], seeds=2)
    assert len(rows) == 16
    late = [row for row in rows if row["held"] < row["seeds"]]
    short = [row for row in rows if row["tokens_s"] < (GOALS[row["batch"]].get(row["target_ms"]) or 0)]
    assert not late and not short
