"""Telemetry by resolution: 1 s points and coarser ones made of them, each with the raw values it sums up."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Executable, Row, Text, bindparam, cast, delete, func, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from db import touched
from db.base import Base, upsert


class TelemetryRecord(Base):
    """The interval of `resolution_s` seconds that starts at `time`: a `schemas.TelemetryPoint` and, packed by
    `core.telemetry.interval`, the values it was computed from."""

    __tablename__ = "telemetry"

    resolution_s: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    time: Mapped[datetime] = mapped_column(primary_key=True)
    point: Mapped[dict[str, Any]]
    raw: Mapped[bytes]


# Asked for several times a second, so that they are built once. There may be intervals that are still to come, where
# the clock was set back.
_SPAN = (
    TelemetryRecord.resolution_s == bindparam("resolution_s"),
    TelemetryRecord.time.between(bindparam("start"), bindparam("end")),
)
_STORED = (
    select(TelemetryRecord.time, TelemetryRecord.resolution_s, TelemetryRecord.raw)
    .where(*_SPAN)
    .order_by(TelemetryRecord.time)
)
_NEWEST = select(TelemetryRecord.point).where(*_SPAN).order_by(TelemetryRecord.time.desc()).limit(1)
_TEXTS = (
    select(TelemetryRecord.time, cast(TelemetryRecord.point, Text).label("point"))
    .where(*_SPAN)
    .order_by(TelemetryRecord.time)
    .subquery()
)
_POINTS = select(func.aggregate_strings(_TEXTS.c.point, ","), func.max(_TEXTS.c.time))


def put(session: Session, resolution_s: int, rows: Iterable[tuple[datetime, Mapping[str, Any], bytes]]) -> None:
    """Write intervals; one that is there already is replaced."""
    values = [
        {"resolution_s": resolution_s, "time": time, "point": dict(point), "raw": raw} for time, point, raw in rows
    ]
    if not values:
        return
    session.connection().execute(_replacing(session.connection().dialect.name), values)
    touched.note(session, TelemetryRecord.__tablename__)


@functools.cache
def _replacing(dialect: str) -> Executable:
    insert = upsert(TelemetryRecord.table(), dialect)
    change = {"point": insert.excluded.point, "raw": insert.excluded.raw}
    return insert.on_conflict_do_update(index_elements=["resolution_s", "time"], set_=change)


def between(session: Session, resolution_s: int, start: datetime, end: datetime | None = None) -> list[TelemetryRecord]:
    """Oldest first, start ≤ time < end."""
    query = select(TelemetryRecord).where(TelemetryRecord.resolution_s == resolution_s, TelemetryRecord.time >= start)
    if end is not None:
        query = query.where(TelemetryRecord.time < end)
    return list(session.scalars(query.order_by(TelemetryRecord.time)))


def points(
    session: Session, resolution_s: int, start: datetime, end: datetime
) -> list[tuple[datetime, int, dict[str, Any]]]:
    """(time, seconds, point) of the intervals that begin from `start` to `end`, oldest first, without the raw
    values."""
    query = select(TelemetryRecord.time, TelemetryRecord.resolution_s, TelemetryRecord.point).where(
        TelemetryRecord.resolution_s == resolution_s, TelemetryRecord.time.between(start, end)
    )
    return [(row[0], row[1], row[2]) for row in session.execute(query.order_by(TelemetryRecord.time))]


def stored(session: Session, resolution_s: int, start: datetime, end: datetime) -> Sequence[Row[datetime, int, bytes]]:
    """time, resolution_s and raw of the intervals that begin from `start` to `end`, oldest first."""
    return session.execute(_STORED, {"resolution_s": resolution_s, "start": start, "end": end}).all()


def points_json(session: Session, resolution_s: int, start: datetime, end: datetime) -> tuple[str, datetime | None]:
    """The points that begin from `start` to `end`, oldest first, as a JSON array, and the time of the last one. In one
    row: SQLite's driver lets go of the interpreter's lock for each row that it fetches, and then has to wait for it."""
    listed, last = session.execute(_POINTS, {"resolution_s": resolution_s, "start": start, "end": end}).one()
    return f"[{listed or ''}]", last


def newest_point(session: Session, resolution_s: int, start: datetime, end: datetime) -> dict[str, Any] | None:
    """Of the last interval that began from `start` to `end`."""
    return session.scalar(_NEWEST, {"resolution_s": resolution_s, "start": start, "end": end})


def first_time(session: Session, resolution_s: int, start: datetime | None = None) -> datetime | None:
    """Of the oldest interval, at or after `start`."""
    query = select(func.min(TelemetryRecord.time)).where(TelemetryRecord.resolution_s == resolution_s)
    if start is not None:
        query = query.where(TelemetryRecord.time >= start)
    return session.scalar(query)


def last_time(session: Session, resolution_s: int) -> datetime | None:
    return session.scalar(select(func.max(TelemetryRecord.time)).where(TelemetryRecord.resolution_s == resolution_s))


def drop_before(session: Session, resolution_s: int, time: datetime) -> None:
    session.execute(
        delete(TelemetryRecord).where(TelemetryRecord.resolution_s == resolution_s, TelemetryRecord.time < time)
    )
