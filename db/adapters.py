"""Adapters and their versions. The files of a version are a peft folder in the data directory."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, String, delete, select
from sqlalchemy.orm import Mapped, Session, mapped_column, relationship

from db.base import Base
from db.scope import Owned, all_tenants, home


class AdapterRecord(Owned, Base):
    """A name is the engine's address of the adapter, so that it is one tenant's only. `wanted_version` is what the engine is to serve under the name, `deployed_version` what it does serve:
    `engine_id` says which engine, since a fresh one serves none. `deleted`: gone for everyone but the engine, which has
    to let go of it first. `last_version` keeps numbers from being given twice."""

    __tablename__ = "adapters"
    __table_args__ = (
        CheckConstraint("deployment IN ('none', 'loading', 'deployed', 'unloading', 'failed')", name="deployment"),
    )

    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    created_at: Mapped[datetime]
    last_version: Mapped[int] = mapped_column(default=0)
    wanted_version: Mapped[int | None]
    deployed_version: Mapped[int | None]
    engine_id: Mapped[str | None] = mapped_column(String(120))
    deployment: Mapped[str] = mapped_column(String(12), default="none")
    deleted: Mapped[bool] = mapped_column(default=False)
    error: Mapped[dict[str, Any] | None]
    versions: Mapped[list[AdapterVersionRecord]] = relationship(
        order_by="AdapterVersionRecord.version", cascade="all, delete-orphan", lazy="selectin", passive_deletes=True
    )


class AdapterVersionRecord(Base):
    __tablename__ = "adapter_versions"

    name: Mapped[str] = mapped_column(ForeignKey("adapters.name", ondelete="CASCADE"), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    created_at: Mapped[datetime]
    origin: Mapped[str] = mapped_column(String(12))
    job_id: Mapped[str | None] = mapped_column(String(40))
    dataset_id: Mapped[str | None] = mapped_column(String(40))
    rank: Mapped[int]
    alpha: Mapped[float]
    target_modules: Mapped[list[Any]]
    bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(String(64))


def find(session: Session, name: str) -> AdapterRecord | None:
    """One that is not deleted."""
    return session.scalar(select(AdapterRecord).where(AdapterRecord.name == name, AdapterRecord.deleted.is_(False)))


def taken(session: Session, name: str) -> bool:
    """Whether another tenant than the session's has the name."""
    owner = session.scalar(
        select(AdapterRecord.tenant).where(AdapterRecord.name == name), execution_options=all_tenants()
    )
    return owner is not None and owner != home(session)


def version_of(record: AdapterRecord, version: int | None) -> AdapterVersionRecord | None:
    """The version, or (None) the newest."""
    if version is None:
        return record.versions[-1] if record.versions else None
    return next((row for row in record.versions if row.version == version), None)


def claim(session: Session, name: str, time: datetime, tenant: str) -> AdapterRecord:
    """The name's record, made for the tenant when there is none; one that waits for the engine to let go of it is taken up again."""
    record = session.scalar(select(AdapterRecord).where(AdapterRecord.name == name))
    if record is None:
        record = AdapterRecord(name=name, tenant=tenant, created_at=time, last_version=0, deployment="none", deleted=False)
        session.add(record)
    elif record.deleted:
        record.deleted = False
        record.created_at = time
    return record


def page(session: Session, limit: int, after: str | None) -> list[AdapterRecord]:
    """By name, those above `after`."""
    query = select(AdapterRecord).where(AdapterRecord.deleted.is_(False)).order_by(AdapterRecord.name).limit(limit)
    if after is not None:
        query = query.where(AdapterRecord.name > after)
    return list(session.scalars(query))


def everything(session: Session) -> list[AdapterRecord]:
    """All, the deleted ones that the engine still holds too."""
    return list(session.scalars(select(AdapterRecord).order_by(AdapterRecord.name)))


def remove(session: Session, name: str) -> None:
    session.execute(delete(AdapterRecord).where(AdapterRecord.name == name))
