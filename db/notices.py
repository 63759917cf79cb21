"""What engines and those who follow them had to tell people: the guard's reason, a fallback, other targets in force."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import String, Text, delete, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from db.base import Base, BigId


class NoticeRecord(Base):
    """`code` is a word for programs (``guard``, ``guard_lifted``, ``targets`` ...), `message` a sentence."""

    __tablename__ = "notices"
    __table_args__ = ({"sqlite_autoincrement": True},)

    id: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    engine_id: Mapped[str] = mapped_column(String(120), index=True)
    time: Mapped[datetime] = mapped_column(index=True)
    level: Mapped[str] = mapped_column(String(8))
    code: Mapped[str] = mapped_column(String(40))
    message: Mapped[str] = mapped_column(Text)


def last(
    session: Session,
    limit: int,
    *,
    engine_id: str | None = None,
    codes: tuple[str, ...] = (),
    before: int | None = None,
) -> list[NoticeRecord]:
    """The newest first, of one engine or all, of some codes or all, those with an id below `before`."""
    query = select(NoticeRecord).order_by(NoticeRecord.id.desc()).limit(limit)
    if engine_id is not None:
        query = query.where(NoticeRecord.engine_id == engine_id)
    if codes:
        query = query.where(NoticeRecord.code.in_(codes))
    if before is not None:
        query = query.where(NoticeRecord.id < before)
    return list(session.scalars(query))


def drop_before(session: Session, time: datetime) -> None:
    session.execute(delete(NoticeRecord).where(NoticeRecord.time < time))
