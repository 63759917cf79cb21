"""What a tenant may use of finetuning, and what it has used, by day (UTC)."""

from __future__ import annotations

from datetime import date

from sqlalchemy import BigInteger, String, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from db.base import Base
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
    record = session.scalar(select(UsageRecord).where(UsageRecord.tenant == tenant, UsageRecord.day == day))
    if record is None:
        session.add(UsageRecord(tenant=tenant, day=day, tokens=tokens))
        session.flush()
    else:
        record.tokens += tokens
