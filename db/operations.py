"""Work that outlasts a request's patience (checking an upload, merging an adapter into its base), while it goes on and
for a while after."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, String, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from db.base import Base
from db.scope import Owned


class OperationRecord(Owned, Base):
    """`done` of `total` bytes; `cancel` is asked of whoever works on it. `result` names what came of it, for a merged
    model the file's name; `worker`: the API process."""

    __tablename__ = "operations"
    __table_args__ = (
        CheckConstraint("state IN ('running', 'succeeded', 'failed', 'cancelled')", name="state"),
        CheckConstraint("kind IN ('dataset', 'merge')", name="kind"),
    )

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    kind: Mapped[str] = mapped_column(String(12))
    subject: Mapped[str] = mapped_column(String(200))
    state: Mapped[str] = mapped_column(String(12), default="running")
    done: Mapped[int] = mapped_column(BigInteger, default=0)
    total: Mapped[int] = mapped_column(BigInteger, default=0)
    cancel: Mapped[bool] = mapped_column(default=False)
    worker: Mapped[str] = mapped_column(String(120))
    result: Mapped[str | None] = mapped_column(String(200))
    error: Mapped[dict[str, Any] | None]
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime]


def find(session: Session, operation_id: str) -> OperationRecord | None:
    return session.scalar(select(OperationRecord).where(OperationRecord.id == operation_id))


def page(session: Session, kind: str | None, limit: int) -> list[OperationRecord]:
    """Newest first."""
    query = select(OperationRecord).order_by(OperationRecord.created_at.desc(), OperationRecord.id).limit(limit)
    return list(session.scalars(query if kind is None else query.where(OperationRecord.kind == kind)))


def running(session: Session) -> list[OperationRecord]:
    """Those that are said to run."""
    return list(session.scalars(select(OperationRecord).where(OperationRecord.state == "running")))


def ended(session: Session, before: datetime) -> list[OperationRecord]:
    query = select(OperationRecord).where(OperationRecord.state != "running", OperationRecord.updated_at < before)
    return list(session.scalars(query))
