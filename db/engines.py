"""Engines as they reported themselves; the current one is that which said hello last."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import CheckConstraint, String, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from db.base import Base


class EngineRecord(Base):
    """`hello` is its `core.link.messages.Hello`, `state` how it stands: ready, lost (fell silent) or gone (said
    goodbye, or another came in its place). `applied_version`: the targets it plans with. `learnt`: its last
    `core.link.messages.Learnt`."""

    __tablename__ = "engines"
    __table_args__ = (CheckConstraint("state IN ('ready', 'lost', 'gone')", name="state"),)

    id: Mapped[str] = mapped_column(String(120), primary_key=True)
    state: Mapped[str] = mapped_column(String(8))
    hello: Mapped[dict[str, Any]]
    since: Mapped[datetime]
    state_since: Mapped[datetime]
    applied_version: Mapped[int | None]
    learnt: Mapped[dict[str, Any] | None]


# Asked for several times a second, so that it is built once.
_CURRENT = select(EngineRecord).order_by(EngineRecord.since.desc()).limit(1)


def current(session: Session) -> EngineRecord | None:
    return session.scalar(_CURRENT)


def state(session: Session) -> str | None:
    """Of the current one."""
    return session.scalar(select(EngineRecord.state).order_by(EngineRecord.since.desc()).limit(1))


def newest_first(session: Session) -> list[EngineRecord]:
    return list(session.scalars(select(EngineRecord).order_by(EngineRecord.since.desc()).limit(200)))


def others(session: Session, engine_id: str) -> list[EngineRecord]:
    return list(session.scalars(select(EngineRecord).where(EngineRecord.id != engine_id)))
