"""What a job's adapter answered on the way: a row per evaluated step and prompt."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ForeignKey, Text, delete, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from db.base import Base


class SampleRecord(Base):
    """`number` is the prompt's place among the job's; `tokens` counts those of the answer."""

    __tablename__ = "job_samples"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    time: Mapped[datetime]
    prompt: Mapped[str] = mapped_column(Text)
    answer: Mapped[str] = mapped_column(Text)
    tokens: Mapped[int | None]


def of_job(session: Session, job_id: str) -> list[SampleRecord]:
    """By step, then by prompt."""
    query = select(SampleRecord).where(SampleRecord.job_id == job_id)
    return list(session.scalars(query.order_by(SampleRecord.step, SampleRecord.number)))


def put(session: Session, rows: list[SampleRecord]) -> None:
    """Write a step's answers in place of those that it had."""
    for row in rows:
        session.merge(row)


def drop_after(session: Session, job_id: str, step: int) -> None:
    """Forget steps beyond a checkpoint that the job goes back to."""
    session.execute(delete(SampleRecord).where(SampleRecord.job_id == job_id, SampleRecord.step > step))
