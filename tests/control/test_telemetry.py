"""History at several resolutions, retention, figures in a process that does not follow the engine."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from core.control import telemetry
from core.control.context import Control
from core.telemetry import interval as iv
from db import changes, idempotency
from db import telemetry as rows
from db.base import now
from tests.control.figures import history
from tests.telemetry.test_interval import message


def fill(control: Control, start: datetime, seconds: int, tokens: int = 2) -> None:
    """One gap a second: 10.00 ms, 11.00 ms, ... over again every 10 s, plus digits that rounding takes off."""
    base = int(start.timestamp())
    with control.store.write() as session:
        for second in range(base, base + seconds):
            gap = 10.0 + second % 10 + 0.0123
            report = message(time=second + 1.0, interval_s=1.0, itl=[(gap, 2)], decode_tokens=tokens)
            seen = iv.of_message(report, {None: 15.5})
            telemetry.put_second(session, second, seen)


def roll_up(control: Control) -> None:
    with control.store.write() as session:
        telemetry.roll_up(session, now())


def count(control: Control, resolution: int) -> int:
    with control.store.read() as session:
        return len(rows.between(session, resolution, datetime.fromtimestamp(0, UTC)))


def aligned(ago_s: int) -> datetime:
    """A whole minute about that long ago."""
    return datetime.fromtimestamp((now().timestamp() - ago_s) // 60 * 60, UTC)


def test_the_last_minutes_come_in_seconds(control: Control) -> None:
    fill(control, now() - timedelta(seconds=30), 20)
    points = history(control, 60, 60)
    assert len(points) == 20
    assert all(point.interval_s == 1 for point in points)
    assert points == sorted(points, key=lambda point: point.time)


def test_fewer_points_are_of_the_raw_values_of_their_seconds(control: Control) -> None:
    fill(control, aligned(300), 300)
    points = history(control, 400, 100)
    assert len(points) <= 100
    whole = [point for point in points if point.interval_s == 4]
    largest = 10 + max(int(whole[0].time.timestamp() + second) % 10 for second in range(4))
    assert whole[0].itl_p99_ms == pytest.approx(largest, 0.01)
    assert sum(point.interval_s for point in points) == 300


def test_a_point_that_an_earlier_version_stored_has_what_came_since_by_default(control: Control) -> None:
    time = now() - timedelta(seconds=10)
    with control.store.write() as session:
        rows.put(session, 1, [(time, {"time": time.isoformat(), "interval_s": 1.0, "itl_p99_ms": 12.5}, b"")])
    (point,) = history(control, 60, 60)
    assert (point.time, point.itl_p99_ms, point.guard_pauses, point.memory) == (time, 12.5, 0, None)


def test_coarser_points_are_made_once_and_only_of_whole_spans(control: Control) -> None:
    fill(control, aligned(200), 125)
    roll_up(control)
    assert (count(control, 10), count(control, 60)) == (13, 3)
    roll_up(control)
    assert (count(control, 10), count(control, 60)) == (13, 3)
    with control.store.read() as session:
        minute = rows.between(session, 60, datetime.fromtimestamp(0, UTC))[0]
    seen = iv.unpack(minute.raw)
    assert (seen.itl.total, len(seen.itl.values), seen.decode_tokens) == (120, 10, 120)
    assert minute.point["itl_p50_ms"] == pytest.approx(14.0)
    assert minute.point["attainment"] == pytest.approx(0.6)


def test_a_span_that_is_not_over_waits(control: Control) -> None:
    start = aligned(60)
    fill(control, start, 3)
    for seconds, points in ((9.9, 0), (10.0, 1)):
        with control.store.write() as session:
            telemetry.roll_up(session, start + timedelta(seconds=seconds))
        assert count(control, 10) == points


def test_what_one_owner_left_undone_the_next_one_makes_up(control: Control) -> None:
    fill(control, aligned(1800), 60)
    roll_up(control)
    fill(control, aligned(600), 60)
    roll_up(control)
    assert count(control, 60) == 2


def test_when_the_clock_was_set_back_figures_are_of_now_and_not_of_what_comes_again(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = aligned(60)
    time = start + timedelta(seconds=95)
    fill(control, start, 600, 1)
    with control.store.write() as session:
        telemetry.roll_up(session, start + timedelta(seconds=600))
    assert (count(control, 10), count(control, 60)) == (60, 10)
    fill(control, start, 95, 100)  # comes again
    with control.store.write() as session:
        telemetry.roll_up(session, time)
    monkeypatch.setattr(telemetry, "now", lambda: time)
    live = telemetry.live(control, 30)
    assert live.window is not None and live.now is not None
    assert live.now.decode_tokens_s > 60 and live.window.decode_tokens_s > 90, "and of the second that begins"
    for seconds, points in ((60, 60), (90, 9), (4 * 3600, 240)):
        shown = history(control, seconds, points)
        assert shown[-1].time < time
        assert sum(point.interval_s for point in shown) > min(seconds, 95) - 10, "but for a span cut by the beginning"
        assert {point.decode_tokens_s for point in shown} == {100}


def test_a_long_history_is_coarse_and_its_newest_part_is_there_too(control: Control) -> None:
    fill(control, aligned(7200), 600)
    roll_up(control)
    fill(control, now() - timedelta(seconds=5), 4)
    points = history(control, 4 * 3600, 300)
    assert sum(point.interval_s for point in points) == 604
    assert max(point.interval_s for point in points) <= 60


def test_what_is_too_old_is_forgotten_by_resolution(control: Control) -> None:
    fill(control, aligned(2 * 3600), 60)
    roll_up(control)
    with control.store.write() as session:
        changes.add(session, "jobs", "x", "old")
        session.flush()
        changes.after(session, 0, 10)[0].time = now() - timedelta(hours=2)
        session.add(
            idempotency.IdempotencyRecord(
                tenant="default", key="k", fingerprint="f", job_id="j", created_at=now() - timedelta(days=1, minutes=1)
            )
        )
    with control.store.write() as session:
        telemetry.retain(session, now())
    assert (count(control, 1), count(control, 10), count(control, 60)) == (0, 6, 1)
    with control.store.read() as session:
        assert changes.after(session, 0, 10) == []
        assert session.get(idempotency.IdempotencyRecord, ("default", "k")) is None


def test_a_process_that_does_not_follow_the_engine_reads_its_figures_from_the_store(control: Control) -> None:
    fill(control, now() - timedelta(seconds=30), 60)  # on into what is still to come, however long this takes
    live = telemetry.live(control, 20)
    assert live.window is not None
    assert live.window.decode_tokens_s == pytest.approx(2.0)
    assert live.now is not None


def test_without_reports_there_are_no_figures(control: Control) -> None:
    live = telemetry.live(control, 60)
    assert (live.window, live.now, live.engine.state, live.jobs) == (None, None, "absent", {})


def test_parts_are_what_the_supervisor_wrote(control: Control) -> None:
    assert telemetry.parts(control) == []
    path = control.data_dir / "run" / "parts.json"
    path.write_text('[{"name": "api", "state": "ready", "pid": 7, "since": "2026-11-30T12:00:00Z"}]')
    assert [(part.name, part.state, part.pid) for part in telemetry.parts(control)] == [("api", "ready", 7)]
    path.write_text('[{"name": "ap')
    assert telemetry.parts(control) == [], "one that is being written is no error"
