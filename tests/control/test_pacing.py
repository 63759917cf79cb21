"""Interval jobs, and what the owner of the lease does, while the machine's clock is set."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import apscheduler.schedulers.base
import apscheduler.triggers.interval
import pytest

from core.control import owner, pacing
from core.control.context import Control
from core.control.owner import LEASE, LEASE_S, Owner
from core.control.pacing import PacedScheduler
from db import base
from db.leases import LeaseRecord
from tests.clock import Set, wall
from tests.stack import until

HOUR = timedelta(hours=1)


@pytest.fixture
def put_clock(monkeypatch: pytest.MonkeyPatch) -> Set:
    return wall(monkeypatch, apscheduler.schedulers.base, apscheduler.triggers.interval, base, owner, pacing)


@pytest.fixture
def scheduler() -> Iterator[PacedScheduler]:
    made = PacedScheduler(timezone=UTC, job_defaults={"coalesce": True, "misfire_grace_time": None})
    made.start()
    yield made
    made.shutdown()


@pytest.mark.parametrize("by", [-HOUR, HOUR])
def test_jobs_keep_their_pace_when_the_clock_is_set(scheduler: PacedScheduler, put_clock: Set, by: timedelta) -> None:
    often: list[float] = []
    seldom: list[float] = []
    scheduler.add_job(lambda: often.append(time.monotonic()), "interval", seconds=0.1)
    scheduler.add_job(lambda: seldom.append(time.monotonic()), "interval", seconds=600, next_run_time=datetime.now(UTC))
    until(lambda: len(often) > 2 and seldom)
    for clock in (by, timedelta()):
        seen = len(seldom)
        put_clock(clock)
        set_at = time.monotonic()
        until(lambda seen=seen: len(seldom) > seen, 5, "what is seldom done to be done, however long that would be")
        until(lambda set_at=set_at: sum(at > set_at + 0.5 for at in often) > 2, 5, "what is often done to go on")
    assert len(seldom) == 3, "once each time"


def test_what_a_machine_missed_asleep_is_not_counted_run_by_run(
    scheduler: PacedScheduler, put_clock: Set, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[datetime] = []
    following = apscheduler.triggers.interval.IntervalTrigger.get_next_fire_time

    def counting(trigger: object, previous: datetime, now: datetime) -> datetime:
        counted.append(previous)
        found: datetime = following(trigger, previous, now)
        return found

    monkeypatch.setattr(apscheduler.triggers.interval.IntervalTrigger, "get_next_fire_time", counting)
    ran: list[None] = []
    scheduler.add_job(lambda: ran.append(None), "interval", seconds=0.2)
    until(lambda: ran)
    put_clock(timedelta(days=1))
    seen = len(ran)
    until(lambda: len(ran) > seen + 2)
    assert len(counted) < 100


@pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)
def test_the_lease_is_renewed_and_work_goes_on_when_the_clock_is_set_back(
    control: Control, put_clock: Set, owner: Owner
) -> None:
    until(lambda: owner.owns)
    time.sleep(0.5)  # into the pauses between renewals
    put_clock(-HOUR)

    def left_s() -> float:
        with control.store.read() as session:
            return (session.get_one(LeaseRecord, LEASE).expires_at - base.now()).total_seconds()

    until(lambda: left_s() <= LEASE_S, 10, "the lease to be renewed")
    time.sleep(LEASE_S)
    assert 0 < left_s() <= LEASE_S, "again and again"
    assert owner.owns
