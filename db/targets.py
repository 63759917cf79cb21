"""Latency targets: one row per version, the highest is in force."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import String, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from db.base import Base


class TargetsRecord(Base):
    """`targets` is a list of {kind, ms, quantile}; `origin`: ``measured`` (the default) or ``set`` (by someone)."""

    __tablename__ = "targets"

    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    targets: Mapped[list[Any]]
    origin: Mapped[str] = mapped_column(String(12))
    updated_at: Mapped[datetime]


# Asked for several times a second, so that it is built once.
_CURRENT = select(TargetsRecord).order_by(TargetsRecord.version.desc()).limit(1)


def current(session: Session) -> TargetsRecord | None:
    return session.scalar(_CURRENT)
