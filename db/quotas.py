"""What a tenant may use of finetuning, and what it has used, by day (UTC)."""

from __future__ import annotations

import functools
from datetime import date

from sqlalchemy import BigInteger, Executable, String, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from db import touched
from db.base import Base, upsert
from db.scope import Owned


class QuotaRecord(Owned, Base):
    """None: no limit; of `max_priority`, the highest that its jobs may be given, the tenant's own default.
    `running_jobs` are those that an engine holds, `waiting_jobs` those in the queue."""

    __tablename__ = "quotas"

    tenant: Mapped[str] = mapped_column(String(63), primary_key=True)
    finetune_tokens_day: Mapped[int | None] = mapped_column(BigInteger)
    running_jobs: Mapped[int | None]
    waiting_jobs: Mapped[int | None]
    max_priority: Mapped[int | None]


class UsageRecord(Owned, Base):
    """Tokens that the tenant's jobs trained on, padding not counted; what is done again after a crash counts once."""

    __tablename__ = "finetune_usage"

    tenant: Mapped[str] = mapped_column(String(63), primary_key=True)
    day: Mapped[date] = mapped_column(primary_key=True)
    tokens: Mapped[int] = mapped_column(BigInteger, default=0)


def of(session: Session, tenant: str) -> QuotaRecord | None:
    return session.scalar(select(QuotaRecord).where(QuotaRecord.tenant == tenant))


def everything(session: Session) -> list[QuotaRecord]:
    return list(session.scalars(select(QuotaRecord)))


def used(session: Session, tenant: str, day: date) -> int:
    """Tokens of that day."""
    query = select(UsageRecord.tokens).where(UsageRecord.tenant == tenant, UsageRecord.day == day)
    return session.scalar(query) or 0


def add(session: Session, tenant: str, day: date, tokens: int) -> None:
    row = {"tenant": tenant, "day": day, "tokens": tokens}
    session.connection().execute(_addition(session.connection().dialect.name), row)
    touched.note(session, UsageRecord.__tablename__)


@functools.cache
def _addition(dialect: str) -> Executable:
    table = UsageRecord.table()
    insert = upsert(table, dialect)
    more = {"tokens": table.c.tokens + insert.excluded.tokens}
    return insert.on_conflict_do_update(index_elements=["tenant", "day"], set_=more)
