"""Jobs by cron: each run once, late rather than never, the missed ones as one, from the newest data on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from core.api import schemas
from core.api.job_schemas import Schedule, ScheduleCreate, SchedulePatch
from core.control import adapters, datasets, jobs, schedules
from core.control.context import Control
from core.errors import Invalid, NotFound
from db import schedules as rows
from tests.control import files

NIGHTLY = "0 2 * * *"
Make = Callable[..., Schedule]


@pytest.fixture
def store_url(sqlite_url: str) -> str:
    return sqlite_url


@pytest.fixture
def make(control: Control, dataset: schemas.Dataset) -> Make:
    def run(cron: str = NIGHTLY, job: dict[str, object] | None = None, **fields: object) -> Schedule:
        spec = {"dataset": dataset.id, "adapter_name": "sailor", **(job or {})}
        body = ScheduleCreate.model_validate({"name": "n", "cron": cron, "job": spec, **fields})
        return schedules.create(control, body)

    return run


def due(control: Control, schedule: Schedule, *, late: timedelta = timedelta()) -> datetime:
    """Wind its next run back, so that it is due now; the moment of looking."""
    time = datetime.now(UTC)
    with control.store.write() as session:
        record = rows.find(session, schedule.id)
        assert record is not None
        record.next_run_at = time - late
    return time


def ran(control: Control) -> list[schemas.Job]:
    return list(reversed(jobs.page(control, 100, None, None).items))


@pytest.mark.parametrize(
    ("cron", "zone", "after", "expected"),
    [
        (NIGHTLY, "UTC", "2026-03-10T01:00Z", "2026-03-10T02:00Z"),
        (NIGHTLY, "Europe/Berlin", "2026-07-10T01:00Z", "2026-07-11T00:00Z"),
        ("*/15 * * * *", "UTC", "2026-03-10T01:15Z", "2026-03-10T01:30Z"),
        ("0 9 * * mon", "UTC", "2026-03-10T01:00Z", "2026-03-16T09:00Z"),
        # The night on which the clocks go forward has no half past two.
        ("30 2 * * *", "Europe/Berlin", "2026-03-28T12:00Z", "2026-03-29T01:30Z"),
        ("30 2 * * *", "Europe/Berlin", "2026-03-29T01:10Z", "2026-03-29T01:30Z"),
        ("0 0 * * *", "America/Havana", "2026-03-07T12:00Z", "2026-03-08T05:00Z"),
        # The night on which they go back has two; a line with a star goes on at its pace.
        ("30 2 * * *", "Europe/Berlin", "2026-10-24T12:00Z", "2026-10-25T00:30Z"),
        ("30 2 * * *", "Europe/Berlin", "2026-10-25T00:30Z", "2026-10-26T01:30Z"),
        ("0 2 1 * 0", "Europe/Berlin", "2026-10-25T00:00:01Z", "2026-11-01T01:00Z"),
        ("30 * * * *", "Europe/Berlin", "2026-10-25T00:30Z", "2026-10-25T01:30Z"),
        ("* * * * *", "UTC", "2026-03-10T01:00Z", "2026-03-10T01:01Z"),
    ],
)
def test_the_next_run_is_by_the_clocks_of_its_zone(cron: str, zone: str, after: str, expected: str) -> None:
    found = schedules.next_run(cron, zone, datetime.fromisoformat(after))
    assert found.astimezone(UTC) == datetime.fromisoformat(expected)


@pytest.mark.parametrize(
    ("weekday", "days"),
    [
        ("0", "Sun"), ("7", "Sun"), ("sun", "Sun"), ("1-5", "Mon Tue Wed Thu Fri"), ("MON-FRI", "Mon Tue Wed Thu Fri"),
        ("5-7", "Fri Sat Sun"), ("fri-mon", "Mon Fri Sat Sun"), ("6,0", "Sat Sun"), ("*/2", "Tue Thu Sat Sun"),
        ("1-5/2", "Mon Wed Fri"), ("4/2", "Thu Sat"), ("*", "Mon Tue Wed Thu Fri Sat Sun"),
    ],
)  # fmt: skip
def test_days_of_the_week_are_numbered_as_cron_does(weekday: str, days: str) -> None:
    moment = datetime(2026, 11, 29, 12, tzinfo=UTC)  # a Sunday, after the run
    runs = []
    while (moment := schedules.next_run(f"0 2 * * {weekday}", "UTC", moment)) < datetime(2026, 12, 7, tzinfo=UTC):
        runs.append(f"{moment:%a}")
    assert " ".join(runs) == days


def test_of_a_day_and_a_weekday_either_is_enough_as_in_cron() -> None:
    moment, runs = datetime(2026, 12, 1, 12, tzinfo=UTC), []
    for _ in range(3):
        moment = schedules.next_run("0 2 10 * 1", "UTC", moment)
        runs.append(moment.day)
    assert runs == [7, 10, 14]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"cron": "every night"}, "cron"), ({"cron": "61 * * * *"}, "cron"), ({"cron": "0 0 31 2 *"}, "cron"),
        ({"cron": "0 0 * * mon#2"}, "cron"), ({"cron": "0 0 * jan/2 *"}, "cron"), ({"cron": "0 0 last-1 * *"}, "cron"),
        ({"timezone": "Atlantis"}, "timezone"), ({"job": {"deadline": "2099-01-01T00:00:00Z"}}, "job.deadline"),
        ({"job": {"epochs": 1, "max_steps": 2}}, "max_steps"), ({"job": {"dataset": "lakes"}}, "dataset"),
    ],
)  # fmt: skip
def test_what_could_never_run_is_refused_with_its_field(make: Make, fields: dict[str, object], param: str) -> None:
    with pytest.raises((Invalid, NotFound)) as caught:
        make(**fields)
    assert caught.value.param == param


def test_what_is_not_due_does_not_run(control: Control, make: Make) -> None:
    schedule = make()
    assert schedule.next_run_at is not None
    schedules.run_due(control, schedule.next_run_at - timedelta(microseconds=1))
    assert ran(control) == []


def test_a_run_makes_a_job_of_the_newest_version(control: Control, make: Make, tmp_path: Path) -> None:
    schedule = make()
    path = files.jsonl(tmp_path / "more.jsonl", rows=12)
    newer, _ = datasets.store(control, path, path.name, "0" * 64, "rivers", None, True)
    time = due(control, schedule)
    schedules.run_due(control, time)
    (job,) = ran(control)
    assert (job.dataset_id, job.schedule_id) == (newer.id, schedule.id)
    told = schedules.get(control, schedule.id)
    assert (told.last_job_id, told.last_message) == (job.id, f"submitted job {job.id}")
    assert told.next_run_at is not None and told.next_run_at > time
    schedules.run_due(control, time)
    assert len(ran(control)) == 1


def test_of_many_missed_runs_one_comes_and_late(control: Control, make: Make) -> None:
    schedule = make("* * * * *")
    time = due(control, schedule, late=timedelta(days=3))
    for _ in range(5):
        schedules.run_due(control, time)
    assert len(ran(control)) == 1
    following = schedules.get(control, schedule.id).next_run_at
    assert following is not None and timedelta() < following - time <= timedelta(minutes=1)


def test_two_processes_that_look_at_once_make_one_job(control: Control, make: Make) -> None:
    time = due(control, make())
    threads = [threading.Thread(target=schedules.run_due, args=(control, time)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ran(control)) == 1


def test_a_crash_between_job_and_note_makes_no_second_one(control: Control, make: Make) -> None:
    schedule = make()
    time = due(control, schedule)
    schedules.run_due(control, time)
    with control.store.write() as session:
        record = rows.find(session, schedule.id)
        assert record is not None
        record.next_run_at, record.last_job_id = time, None
    schedules.run_due(control, time)
    assert len(ran(control)) == 1


def test_a_run_is_left_out_while_the_one_before_goes_on(control: Control, make: Make) -> None:
    schedule = make()
    schedules.run_due(control, due(control, schedule))
    schedules.run_due(control, due(control, schedule))
    (job,) = ran(control)
    assert f"job {job.id} of the run before is still queued" in (schedules.get(control, schedule.id).last_message or "")


def test_only_new_data_waits_for_a_version(control: Control, make: Make) -> None:
    schedule = make(only_new_data=True)
    schedules.run_due(control, due(control, schedule))
    jobs.stop(control, ran(control)[0].id, save=False)
    schedules.run_due(control, due(control, schedule))
    assert len(ran(control)) == 1
    assert "no version after 1" in (schedules.get(control, schedule.id).last_message or "")


def test_a_continued_one_goes_on_from_the_adapter_that_there_is(control: Control, make: Make, tmp_path: Path) -> None:
    schedule = make(continued=True, job={"lora": {"rank": 4, "dropout": 0.1}})
    schedules.run_due(control, due(control, schedule))
    (first,) = ran(control)
    assert (first.spec.initial_adapter, first.spec.lora.rank) == (None, 4)
    jobs.stop(control, first.id, save=False)
    adapters.upload(control, files.adapter(tmp_path / "made", rank=4), "sailor", False)
    schedules.run_due(control, due(control, schedule))
    second = ran(control)[1]
    assert (second.spec.initial_adapter, second.spec.lora.dropout) == ("sailor@1", 0.1)


def test_a_run_that_cannot_be_says_why_and_the_next_one_is_planned(control: Control, make: Make) -> None:
    schedule = make()
    datasets.delete(control, "rivers")
    time = due(control, schedule)
    schedules.run_due(control, time)
    told = schedules.get(control, schedule.id)
    assert "no data set rivers any more" in (told.last_message or "") and ran(control) == []
    assert told.next_run_at is not None and told.next_run_at > time


def test_one_whose_zone_there_is_no_more_says_so_and_the_others_run(control: Control, make: Make) -> None:
    old, other = make(), make(job={"adapter_name": "pilot"})
    due(control, old, late=timedelta(hours=1))
    time = due(control, other)
    with control.store.write() as session:
        record = rows.find(session, old.id)
        assert record is not None
        record.timezone = "Atlantis"
    schedules.run_due(control, time)
    assert [job.adapter_name for job in ran(control)] == ["pilot"]
    told = schedules.get(control, old.id)
    assert told.next_run_at is None
    assert (told.last_message or "").startswith("it runs no more: timezone is 'Atlantis'")


def test_switched_off_it_rests_and_by_hand_it_runs(control: Control, make: Make) -> None:
    schedule = make(enabled=False)
    assert schedule.next_run_at is None
    schedules.run_now(control, schedule.id)
    assert len(ran(control)) == 1
    assert schedules.update(control, schedule.id, SchedulePatch(enabled=True)).next_run_at is not None
    schedules.delete(control, schedule.id)
    with pytest.raises(NotFound):
        schedules.get(control, schedule.id)
    assert len(ran(control)) == 1
