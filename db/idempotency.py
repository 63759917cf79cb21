"""Idempotency keys: which job a key was given to, and what was asked with it."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import String, delete
from sqlalchemy.orm import Mapped, Session, mapped_column

from db.base import Base


class IdempotencyRecord(Base):
    """`fingerprint` is the SHA-256 of the request, so that a key that comes with another request is noticed."""

    __tablename__ = "idempotency_keys"

    tenant: Mapped[str] = mapped_column(String(63), primary_key=True)
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    fingerprint: Mapped[str] = mapped_column(String(64))
    job_id: Mapped[str] = mapped_column(String(40))
    created_at: Mapped[datetime] = mapped_column(index=True)


def drop_before(session: Session, time: datetime) -> None:
    session.execute(delete(IdempotencyRecord).where(IdempotencyRecord.created_at < time))
