"""Adapters and their versions. The files of a version are a peft folder in the data directory."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, String, select
from sqlalchemy.orm import Mapped, Session, mapped_column, relationship

from db.base import Base
from db.scope import Owned, all_tenants, home

DEPLOYMENTS = "deployment IN ('none', 'loading', 'deployed', 'unloading', 'failed')"


class Served(Owned):
    """Mixin of what the engine serves under a name: `wanted_version` is what it is to serve, `deployed_version` what it
    does serve; `engine_id` says which engine, since a fresh one serves none. `deleted`: gone for everyone but the
    engine, which has to let go of it first."""

    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    wanted_version: Mapped[int | None]
    deployed_version: Mapped[int | None]
    engine_id: Mapped[str | None] = mapped_column(String(120))
    deployment: Mapped[str] = mapped_column(String(12), default="none")
    deleted: Mapped[bool] = mapped_column(default=False)
    error: Mapped[dict[str, Any] | None]

    @property
    def address(self) -> str:
        """The name that the engine knows it by."""
        return self.name


class AdapterRecord(Served, Base):
    """A name is the engine's address of the adapter, so that it is one tenant's only. `last_version` keeps numbers from
    being given twice."""

    __tablename__ = "adapters"
    __table_args__ = (CheckConstraint(DEPLOYMENTS, name="deployment"),)

    created_at: Mapped[datetime]
    last_version: Mapped[int] = mapped_column(default=0)
    versions: Mapped[list[AdapterVersionRecord]] = relationship(
        order_by="AdapterVersionRecord.version", cascade="all, delete-orphan", lazy="selectin", passive_deletes=True
    )


class AdapterAliasRecord(Served, Base):
    """A name for one of an adapter's versions, which the engine serves as ``name@alias``. `history`: the versions that
    it was before, oldest first."""

    __tablename__ = "adapter_aliases"
    __table_args__ = (CheckConstraint(DEPLOYMENTS, name="deployment"),)

    alias: Mapped[str] = mapped_column(String(31), primary_key=True)
    history: Mapped[list[Any]]
    updated_at: Mapped[datetime]

    @property
    def address(self) -> str:
        return f"{self.name}@{self.alias}"


class AdapterVersionRecord(Base):
    """`base` is the model that it belongs to, `parents` the versions that a merged one was made of."""

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
    base: Mapped[str | None] = mapped_column(String(255))
    parents: Mapped[list[Any] | None]


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
    """The name's record, made for the tenant when there is none; one that waits for the engine to let go of it is taken
    up again."""
    record = session.scalar(select(AdapterRecord).where(AdapterRecord.name == name))
    if record is None:
        record = AdapterRecord(
            name=name, tenant=tenant, created_at=time, last_version=0, deployment="none", deleted=False
        )
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


def everything(session: Session) -> list[AdapterRecord | AdapterAliasRecord]:
    """All that engines serve, the deleted that the engine still holds too."""
    return [
        *session.scalars(select(AdapterRecord).order_by(AdapterRecord.name)),
        *session.scalars(select(AdapterAliasRecord).order_by(AdapterAliasRecord.name, AdapterAliasRecord.alias)),
    ]


def again(session: Session, record: AdapterRecord | AdapterAliasRecord) -> AdapterRecord | AdapterAliasRecord | None:
    """The record as it is now, for one of an earlier session."""
    if isinstance(record, AdapterRecord):
        return session.get(AdapterRecord, record.name)
    return session.get(AdapterAliasRecord, {"name": record.name, "alias": record.alias})


def remove(session: Session, record: AdapterRecord | AdapterAliasRecord) -> None:
    session.delete(record)


# ---- aliases ---------------------------------------------------------------------------------------------------------


def alias(session: Session, name: str, alias: str) -> AdapterAliasRecord | None:
    """One that may be deleted and not unloaded yet."""
    query = select(AdapterAliasRecord).where(AdapterAliasRecord.name == name, AdapterAliasRecord.alias == alias)
    return session.scalar(query)


def aliases(session: Session, names: Sequence[str]) -> list[AdapterAliasRecord]:
    """Those of some adapters that are not deleted, in order."""
    query = select(AdapterAliasRecord).where(AdapterAliasRecord.name.in_(names), AdapterAliasRecord.deleted.is_(False))
    return list(session.scalars(query.order_by(AdapterAliasRecord.name, AdapterAliasRecord.alias)))
