"""Data sets: one row per version of a name. The rows themselves are a Parquet file in the data directory."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, String, UniqueConstraint, func, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from db.base import Base
from db.scope import Owned, home


class DatasetRecord(Owned, Base):
    """A name is one of its tenant's. `seq` orders listings; `report` is the validator's; `tokenizer` names the model
    whose tokens it counted; `sha256` is of the uploaded file, `content_sha256` of the rows that came of it."""

    __tablename__ = "datasets"
    __table_args__ = (UniqueConstraint("tenant", "name", "version"), {"sqlite_autoincrement": True})

    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(40), unique=True)
    name: Mapped[str] = mapped_column(String(63))
    version: Mapped[int]
    created_at: Mapped[datetime]
    bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(String(64))
    content_sha256: Mapped[str | None] = mapped_column(String(64))
    tokenizer: Mapped[str | None] = mapped_column(String(1024))
    report: Mapped[dict[str, Any]]


def find(session: Session, name_or_id: str) -> DatasetRecord | None:
    """By id, else the newest version of the session's tenant's name."""
    by_id = session.scalar(select(DatasetRecord).where(DatasetRecord.id == name_or_id))
    if by_id is not None:
        return by_id
    query = select(DatasetRecord).where(DatasetRecord.tenant == home(session), DatasetRecord.name == name_or_id)
    return session.scalar(query.order_by(DatasetRecord.version.desc()).limit(1))


def versions(session: Session, name: str) -> list[DatasetRecord]:
    """All versions of a name, oldest first."""
    query = select(DatasetRecord).where(DatasetRecord.tenant == home(session), DatasetRecord.name == name)
    return list(session.scalars(query.order_by(DatasetRecord.version)))


def last_version(session: Session, name: str) -> int:
    """0 for a name that is free."""
    query = select(func.max(DatasetRecord.version))
    return session.scalar(query.where(DatasetRecord.tenant == home(session), DatasetRecord.name == name)) or 0


def older_than(session: Session, kept: int, time: datetime) -> list[DatasetRecord]:
    """Versions from before `time` that are not among the `kept` newest of their name."""
    place = func.row_number().over(
        partition_by=(DatasetRecord.tenant, DatasetRecord.name), order_by=DatasetRecord.version.desc()
    )
    ranked = select(DatasetRecord.seq, place.label("place")).subquery()
    query = select(DatasetRecord).join(ranked, ranked.c.seq == DatasetRecord.seq)
    return list(session.scalars(query.where(ranked.c.place > kept, DatasetRecord.created_at < time)))


def by_ids(session: Session, ids: Collection[str]) -> list[DatasetRecord]:
    """Those of the ids that there still are."""
    return list(session.scalars(select(DatasetRecord).where(DatasetRecord.id.in_(ids)))) if ids else []


def with_content(session: Session, name: str, content_sha256: str) -> DatasetRecord | None:
    """The newest version of a name that has these rows."""
    found = [record for record in versions(session, name) if record.content_sha256 == content_sha256]
    return found[-1] if found else None


def page(session: Session, limit: int, before: int | None) -> list[DatasetRecord]:
    """Newest first, those with a `seq` below `before`."""
    query = select(DatasetRecord).order_by(DatasetRecord.seq.desc()).limit(limit)
    if before is not None:
        query = query.where(DatasetRecord.seq < before)
    return list(session.scalars(query))
