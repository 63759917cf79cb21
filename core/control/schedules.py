"""Schedules: jobs that are submitted by cron, for finetuning that goes on while a data set grows.

What is due stands in the store and is looked for by the one process that dispatches, and each run has an idempotency
key of its own: two processes never make two jobs of one. A run that is late still comes; of several that were missed
one does.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from apscheduler.triggers.base import BaseTrigger
from apscheduler.triggers.combining import OrTrigger
from apscheduler.triggers.cron import CronTrigger
from sqlalchemy.orm import Session

from core.api.job_schemas import Schedule, ScheduleCreate, SchedulePatch
from core.api.schemas import JobCreate, Page
from core.control import jobs, pages
from core.control.context import Control, new_id
from core.control.principal import itself
from core.errors import HarliError, Invalid, NotFound
from db import adapters as adapter_rows
from db import changes
from db import datasets as dataset_rows
from db import jobs as job_rows
from db import schedules as rows
from db.base import now
from db.jobs import TERMINAL
from db.schedules import ScheduleRecord

_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_DAY = f"[0-7]|{'|'.join(_DAYS)}"
# More than clocks are ever put forward or back by.
_CLOCK_CHANGE = timedelta(hours=3)
_MONTHS = re.compile(r"[a-z]{3}(-[a-z]{3})?")
_WEEKDAYS = re.compile(rf"(?:\*|(?P<first>{_DAY})(?:-(?P<last>{_DAY}))?)(?:/(?P<step>[1-7]))?")

# ---- managing --------------------------------------------------------------------------------------------------------


def create(control: Control, body: ScheduleCreate) -> Schedule:
    """Raises Invalid for what is no cron line or zone, and what the job itself would be refused for."""
    spec = _checked(control, body.job)
    first = next_run(body.cron, body.timezone, now())
    with control.store.write() as session:
        record = ScheduleRecord(
            id=new_id("sch"),
            tenant=control.principal.tenant,
            spec=spec,
            created_at=now(),
            next_run_at=first if body.enabled else None,
            **body.model_dump(exclude={"job"}),
        )
        session.add(record)
        changes.add(session, "schedules", "created", record.id, tenant=record.tenant)
        session.flush()
        return view(record)


def page(control: Control, limit: int, cursor: str | None) -> Page[Schedule]:
    before = pages.key(cursor, int)
    with control.store.read() as session:
        found = rows.page(session, limit + 1, before)
        following = pages.cursor(found[limit - 1].seq) if len(found) > limit else None
        return Page(items=[view(record) for record in found[:limit]], next=following)


def get(control: Control, schedule_id: str) -> Schedule:
    with control.store.read() as session:
        return view(_require(session, schedule_id))


def update(control: Control, schedule_id: str, patch: SchedulePatch) -> Schedule:
    """Change what is given; the next run is then counted from now."""
    spec = _checked(control, patch.job) if patch.job is not None else None
    given = patch.model_dump(exclude={"job"}, exclude_unset=True, exclude_none=True)
    with control.store.write() as session:
        record = _require(session, schedule_id)
        for name, value in given.items():
            setattr(record, name, value)
        if spec is not None:
            record.spec = spec
        if given.keys() & {"cron", "timezone", "enabled"}:
            record.next_run_at = next_run(record.cron, record.timezone, now()) if record.enabled else None
        changes.add(session, "schedules", "changed", record.id, tenant=record.tenant)
        session.flush()
        return view(record)


def delete(control: Control, schedule_id: str) -> None:
    """Submit no further job; those that there are stay as they are."""
    with control.store.write() as session:
        record = _require(session, schedule_id)
        session.delete(record)
        changes.add(session, "schedules", "deleted", record.id, tenant=record.tenant)


def run_now(control: Control, schedule_id: str) -> Schedule:
    """Submit a job at once, whatever the cron line says; the next run comes when it would have come."""
    with control.store.read() as session:
        record = _require(session, schedule_id)
    _run(control, record, f"by-hand:{now().isoformat()}", record.next_run_at)
    return get(control, schedule_id)


def view(record: ScheduleRecord) -> Schedule:
    shown = {name: getattr(record, name) for name in Schedule.model_fields if name != "job"}
    return Schedule.model_validate({**shown, "job": record.spec})


def _require(session: Session, schedule_id: str) -> ScheduleRecord:
    record = rows.find(session, schedule_id)
    if record is None:
        raise NotFound(
            "schedule_not_found", f"there is no schedule {schedule_id}; `harli schedules` lists them", "schedule_id"
        )
    return record


def _checked(control: Control, job: JobCreate) -> dict[str, Any]:
    """The job's plain form, with the data set by name, so that each run takes the newest version."""
    if job.deadline is not None:
        raise Invalid("deadline", "a deadline is one moment and a schedule has many runs; leave it out", "job.deadline")
    jobs.estimate(control, job)
    with control.store.read() as session:
        dataset = dataset_rows.find(session, job.dataset)
    assert dataset is not None
    return {**job.model_dump(mode="json", exclude_unset=True), "dataset": dataset.name}


def next_run(cron: str, timezone: str, after: datetime) -> datetime:
    """The first moment behind `after` that the line names. Raises Invalid for a line or a zone that there is not.

    A time of day that the clocks leave out comes as much later as they are put forward, one that they show twice comes
    the first time, as in cron; a line with ``*`` for minutes or hours, by contrast, goes on at its pace.
    """
    try:
        zone = ZoneInfo(timezone)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise Invalid(
            "timezone",
            f"timezone is {timezone!r}; give a name of the time zone database such as Europe/Berlin or UTC",
            "timezone",
        ) from error
    try:
        found = _next(cron, zone, after)
    except (ValueError, TypeError) as error:
        raise Invalid(
            "cron",
            f"cron is {cron!r}: {error}; give minute, hour, day, month and weekday, such as `0 2 * * *` for every "
            "night at two",
            "cron",
        ) from error
    if found is None:
        raise Invalid("cron", f"cron is {cron!r}, which never comes; give a line that names a day there is", "cron")
    return found


def _next(cron: str, zone: ZoneInfo, after: datetime) -> datetime | None:
    """The first moment behind `after`; None where there is none. Raises ValueError for what is no cron line."""
    tick = timedelta(microseconds=1)
    if any(field.startswith("*") for field in cron.split()[:2]):
        found = _trigger(cron, zone).get_next_fire_time(None, after + tick)
        return found if isinstance(found, datetime) else None
    # What clocks show that are never changed is a moment of the zone's own.
    trigger, shown = _trigger(cron, UTC), after.astimezone(zone).replace(tzinfo=UTC, fold=0) - _CLOCK_CHANGE
    while isinstance(shown := trigger.get_next_fire_time(None, shown), datetime):
        moment = shown.replace(tzinfo=zone).astimezone(UTC)
        if moment > after:
            return moment
        shown += tick
    return None


def _trigger(cron: str, zone: tzinfo) -> BaseTrigger:
    """As cron reads the line: days of the week are numbered from Sunday, which is 0 and 7 (APScheduler's from Monday),
    and where day and weekday are both given, either is enough (APScheduler wants both)."""
    fields = cron.split()
    if len(fields) != 5:
        raise ValueError(f"it has {len(fields)} fields, a cron line has 5")
    minute, hour, day, month, weekday = fields
    # APScheduler reads the beginning of a word such as last-1, jan/2 or mon#2, and passes over the rest.
    for part in day.lower().split(","):
        if part[:1].isalpha() and part != "last":
            raise ValueError(f"{part!r} is no day of the month")
    for part in month.lower().split(","):
        if part[:1].isalpha() and _MONTHS.fullmatch(part) is None:
            raise ValueError(f"{part!r} is no month")
    either = not day.startswith("*") and not weekday.startswith("*")
    weekday = ",".join(map(_weekdays, weekday.lower().split(",")))
    lines = [(day, "*"), ("*", weekday)] if either else [(day, weekday)]
    triggers = [
        CronTrigger(minute=minute, hour=hour, day=day, month=month, day_of_week=weekday, timezone=zone)
        for day, weekday in lines
    ]
    return OrTrigger(triggers) if either else triggers[0]


def _weekdays(part: str) -> str:
    """A part of the weekday's field by names. Raises ValueError for what is none."""
    found = _WEEKDAYS.fullmatch(part)
    if found is None:
        raise ValueError(f"{part!r} is no day of the week")
    if part == "*":
        return part
    first = _weekday(found["first"]) if found["first"] else 0
    last = _weekday(found["last"]) if found["last"] else first
    if found["first"] is None or (found["step"] and not found["last"]):
        last = 6
    if last < first:
        last += 7  # as in fri-mon, or in 5-0
    return ",".join(_DAYS[at % 7] for at in range(first, last + 1, int(found["step"] or 1)))


def _weekday(text: str) -> int:
    return int(text) if text.isdigit() else _DAYS.index(text)


# ---- running ---------------------------------------------------------------------------------------------------------


def run_due(control: Control, time: datetime) -> None:
    """Submit what is due. `control` sees every tenant."""
    with control.store.read() as session:
        due = rows.due(session, time)
    for record in due:
        assert record.next_run_at is not None
        try:
            following = next_run(record.cron, record.timezone, time)
        except Invalid as error:  # a zone that the machine has no more, or a line that was taken before
            _end(control, record, f"it runs no more: {error.message}")
            continue
        _run(control, record, record.next_run_at.isoformat(), following)


def _end(control: Control, record: ScheduleRecord, message: str) -> None:
    with control.store.write() as session:
        found = rows.find(session, record.id)
        if found is not None and found.next_run_at == record.next_run_at:
            found.next_run_at, found.last_message = None, message
            changes.add(session, "schedules", "ended", found.id, tenant=found.tenant, message=message)


def _run(control: Control, record: ScheduleRecord, run: str, following: datetime | None) -> None:
    """Make one run's job and note how it went."""
    own = control.of(itself(record.tenant))
    job_id, dataset_id, message = None, None, ""
    try:
        with own.store.read() as session:
            body, dataset_id, message = _body(session, record)
        if body is not None:
            job, _ = jobs.submit(own, body, f"schedule:{record.id}:{run}", schedule_id=record.id)
            job_id, message = job.id, f"submitted job {job.id}"
    except HarliError as error:
        message = f"no job was made: {error.message}"
    with control.store.write() as session:
        found = rows.find(session, record.id)
        if found is None:
            return
        if found.next_run_at == record.next_run_at:
            found.next_run_at = following
        found.last_run_at, found.last_message = now(), message
        if job_id is not None:
            found.last_job_id, found.last_dataset_id = job_id, dataset_id
        changes.add(session, "schedules", "ran", found.id, tenant=found.tenant, job_id=job_id, message=message)


def _body(session: Session, record: ScheduleRecord) -> tuple[JobCreate | None, str | None, str]:
    """(the run's job, or None; its version of the data set; why there is none)."""
    last = job_rows.find(session, record.last_job_id) if record.last_job_id is not None else None
    if last is not None and last.state not in TERMINAL:
        return None, None, f"left out: job {last.id} of the run before is still {last.state}"
    spec: dict[str, Any] = dict(record.spec)
    dataset = dataset_rows.find(session, spec["dataset"])
    if dataset is None:
        return None, None, f"no job was made: there is no data set {spec['dataset']} any more"
    if record.only_new_data and dataset.id == record.last_dataset_id:
        return None, None, f"left out: data set {dataset.name} has no version after {dataset.version}"
    spec["dataset"] = dataset.id
    adapter = adapter_rows.find(session, spec["adapter_name"]) if record.continued else None
    if adapter is not None and adapter.versions:
        # Its shape is the adapter's from now on.
        lora = {name: spec["lora"][name] for name in ("dropout", "use_rslora") if name in spec.get("lora", {})}
        spec |= {"initial_adapter": f"{adapter.name}@{adapter.versions[-1].version}", "lora": lora}
    return JobCreate.model_validate(spec), dataset.id, ""
