"""What the OpenAI-compatible routes need beside the tables of jobs and data sets."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import ForeignKey, literal, select, tuple_
from sqlalchemy.orm import Mapped, Session, mapped_column

from db.base import Base
from db.datasets import DatasetRecord
from db.jobs import JobEventRecord, JobMetricRecord

EVENT, METRIC = 1, 0


class FineTuningRecord(Base):
    """A job's request as it came in OpenAI's terms, so that it is answered as it was asked."""

    __tablename__ = "fine_tuning_requests"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    request: Mapped[dict[str, Any]]


class Happened(NamedTuple):
    """A row of a job's history: an event's id or a metric's step, by `kind`. Histories are in this order."""

    time: datetime
    kind: int
    number: int


def requests(session: Session, job_ids: Collection[str]) -> dict[str, dict[str, Any]]:
    """By job, of those that came in OpenAI's terms."""
    rows = session.scalars(select(FineTuningRecord).where(FineTuningRecord.job_id.in_(job_ids)))
    return {row.job_id: row.request for row in rows}


def files(session: Session, limit: int, after: int | None, ascending: bool) -> list[DatasetRecord]:
    """In the order of uploads or (not ascending) the other way round, those behind the one whose `seq` is `after`."""
    seq = DatasetRecord.seq
    query = select(DatasetRecord).order_by(seq if ascending else seq.desc()).limit(limit)
    if after is not None:
        query = query.where(seq > after if ascending else seq < after)
    return list(session.scalars(query))


def history(session: Session, job_id: str, limit: int, before: Happened | None) -> list[Happened]:
    """Events and metrics of a job, newest first."""
    of_events = select(JobEventRecord.time, literal(EVENT).label("kind"), JobEventRecord.id.label("number"))
    of_metrics = select(JobMetricRecord.time, literal(METRIC).label("kind"), JobMetricRecord.step.label("number"))
    both = (
        of_events.where(JobEventRecord.job_id == job_id)
        .union_all(of_metrics.where(JobMetricRecord.job_id == job_id))
        .subquery()
    )
    query = select(both).order_by(both.c.time.desc(), both.c.kind.desc(), both.c.number.desc()).limit(limit)
    if before is not None:
        place = tuple_(both.c.time, both.c.kind, both.c.number)
        query = query.where(place < tuple_(literal(before.time, both.c.time.type), before.kind, before.number))
    return [Happened(*row) for row in session.execute(query)]


def events(session: Session, ids: Collection[int]) -> dict[int, JobEventRecord]:
    rows = session.scalars(select(JobEventRecord).where(JobEventRecord.id.in_(ids)))
    return {row.id: row for row in rows}


def metrics(session: Session, job_id: str, steps: Collection[int]) -> dict[int, JobMetricRecord]:
    query = select(JobMetricRecord).where(JobMetricRecord.job_id == job_id, JobMetricRecord.step.in_(steps))
    return {row.step: row for row in session.scalars(query)}


def checkpoint_time(session: Session, job_id: str) -> datetime | None:
    """When the engine last reported one."""
    query = select(JobEventRecord.time).where(JobEventRecord.job_id == job_id, JobEventRecord.kind == "checkpoint")
    return session.scalar(query.order_by(JobEventRecord.id.desc()).limit(1))


def metric_until(session: Session, job_id: str, step: int) -> tuple[float | None, float | None]:
    """(loss, evaluation loss): the last that were measured up to a step."""

    def last(column: Any) -> float | None:
        query = select(column).where(
            JobMetricRecord.job_id == job_id, JobMetricRecord.step <= step, column.is_not(None)
        )
        value: float | None = session.scalar(query.order_by(JobMetricRecord.step.desc()).limit(1))
        return value

    return last(JobMetricRecord.loss), last(JobMetricRecord.eval_loss)
