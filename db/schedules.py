"""Schedules: jobs that are submitted again and again, by cron."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import String, Text, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from db.base import Base
from db.scope import Owned


class ScheduleRecord(Owned, Base):
    """`spec` is the `schemas.JobCreate` that each run submits. `next_run_at` is None while it is not enabled; the run
    that is due is the one at that time, however late it comes. `last_message` says how the last run went."""

    __tablename__ = "schedules"
    __table_args__ = ({"sqlite_autoincrement": True},)

    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(40), unique=True)
    name: Mapped[str] = mapped_column(String(120))
    cron: Mapped[str] = mapped_column(String(120))
    timezone: Mapped[str] = mapped_column(String(64))
    spec: Mapped[dict[str, Any]]
    continued: Mapped[bool] = mapped_column(default=False)
    only_new_data: Mapped[bool] = mapped_column(default=False)
    enabled: Mapped[bool] = mapped_column(default=True)
    created_at: Mapped[datetime]
    next_run_at: Mapped[datetime | None] = mapped_column(index=True)
    last_run_at: Mapped[datetime | None]
    last_job_id: Mapped[str | None] = mapped_column(String(40))
    last_dataset_id: Mapped[str | None] = mapped_column(String(40))
    last_message: Mapped[str | None] = mapped_column(Text)


def find(session: Session, schedule_id: str) -> ScheduleRecord | None:
    return session.scalar(select(ScheduleRecord).where(ScheduleRecord.id == schedule_id))


def page(session: Session, limit: int, before: int | None) -> list[ScheduleRecord]:
    """Newest first, those with a `seq` below `before`."""
    query = select(ScheduleRecord).order_by(ScheduleRecord.seq.desc()).limit(limit)
    if before is not None:
        query = query.where(ScheduleRecord.seq < before)
    return list(session.scalars(query))


def due(session: Session, time: datetime) -> list[ScheduleRecord]:
    """The longest overdue first."""
    query = select(ScheduleRecord).where(ScheduleRecord.enabled.is_(True), ScheduleRecord.next_run_at <= time)
    return list(session.scalars(query.order_by(ScheduleRecord.next_run_at)))
