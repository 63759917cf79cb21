"""What changed, in order, written in the transaction that changed it: the source of the server-sent events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import String, delete, func, insert, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from db import touched
from db.base import Base, BigId, now


class ChangeRecord(Base):
    """`topic` and `kind` as in `schemas.Event`; `ref` is the id of what changed, `tenant` whose it is (None: nobody's
    in particular)."""

    __tablename__ = "changes"
    __table_args__ = ({"sqlite_autoincrement": True},)

    id: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    time: Mapped[datetime] = mapped_column(index=True)
    topic: Mapped[str] = mapped_column(String(16))
    kind: Mapped[str] = mapped_column(String(40))
    ref: Mapped[str | None] = mapped_column(String(120))
    data: Mapped[dict[str, Any]]
    tenant: Mapped[str | None] = mapped_column(String(63))


_INSERT = insert(ChangeRecord.table())


def add(session: Session, topic: str, kind: str, ref: str | None, *, tenant: str | None = None, **data: Any) -> None:
    """A change of what a tenant owns is told to those of that tenant only, so that `tenant` must be given for it."""
    session.add(ChangeRecord(time=now(), topic=topic, kind=kind, ref=ref, data=data, tenant=tenant))


def add_many(session: Session, topic: str, kind: str, ref: str, tenant: str, data: Sequence[Mapping[str, Any]]) -> None:
    """The same change of one thing several times, in order."""
    time = now()
    same = {"time": time, "topic": topic, "kind": kind, "ref": ref, "tenant": tenant}
    session.connection().execute(_INSERT, [{**same, "data": one} for one in data])
    touched.note(session, ChangeRecord.__tablename__)


def after(session: Session, last_id: int, limit: int) -> list[ChangeRecord]:
    query = select(ChangeRecord).where(ChangeRecord.id > last_id).order_by(ChangeRecord.id).limit(limit)
    return list(session.scalars(query))


def last_id(session: Session) -> int:
    return session.scalar(select(func.max(ChangeRecord.id))) or 0


def drop_before(session: Session, time: datetime) -> None:
    session.execute(delete(ChangeRecord).where(ChangeRecord.time < time))
