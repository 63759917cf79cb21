"""Webhooks: who wants to be told of what, and every delivery with its attempts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import CheckConstraint, ColumnElement, ForeignKey, Index, String, Text, and_, delete, func, or_, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from db.base import Base, BigId
from db.scope import Owned


class WebhookRecord(Owned, Base):
    """`job_id`: of this job only; `events`: the kinds that it wants, empty for all."""

    __tablename__ = "webhooks"
    __table_args__ = ({"sqlite_autoincrement": True},)

    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(40), unique=True)
    url: Mapped[str] = mapped_column(String(2048))
    secret: Mapped[str] = mapped_column(String(120), info={"secret": True})
    events: Mapped[list[Any]]
    job_id: Mapped[str | None] = mapped_column(String(40), index=True)
    enabled: Mapped[bool] = mapped_column(default=True)
    created_at: Mapped[datetime]


class DeliveryRecord(Base):
    """One event on its way to one webhook. `status` pending: it is (re)tried at `next_at`; delivered; failed: given up
    on. `error` and `response_status` are of the last attempt."""

    __tablename__ = "webhook_deliveries"
    __table_args__ = (
        CheckConstraint("status IN ('pending', 'delivered', 'failed')", name="status"),
        Index(None, "status", "next_at"),
        Index(None, "webhook_id", "id"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    webhook_id: Mapped[str] = mapped_column(ForeignKey("webhooks.id", ondelete="CASCADE"))
    event_id: Mapped[str] = mapped_column(String(40))
    event: Mapped[str] = mapped_column(String(40))
    payload: Mapped[dict[str, Any]]
    created_at: Mapped[datetime]
    status: Mapped[str] = mapped_column(String(12), default="pending")
    attempts: Mapped[int] = mapped_column(default=0)
    next_at: Mapped[datetime | None]
    delivered_at: Mapped[datetime | None]
    response_status: Mapped[int | None]
    error: Mapped[str | None] = mapped_column(Text)


def find(session: Session, webhook_id: str) -> WebhookRecord | None:
    return session.scalar(select(WebhookRecord).where(WebhookRecord.id == webhook_id))


def page(session: Session, limit: int, before: int | None) -> list[WebhookRecord]:
    """Newest first, those with a `seq` below `before`."""
    query = select(WebhookRecord).order_by(WebhookRecord.seq.desc()).limit(limit)
    if before is not None:
        query = query.where(WebhookRecord.seq < before)
    return list(session.scalars(query))


def count(session: Session, tenant: str) -> int:
    return session.scalar(select(func.count()).where(WebhookRecord.tenant == tenant)) or 0


def wanting(session: Session, tenant: str, event: str, job_id: str | None) -> list[WebhookRecord]:
    """Those that are to be told of an event of a tenant's (of a job's)."""
    query = select(WebhookRecord).where(WebhookRecord.tenant == tenant, WebhookRecord.enabled.is_(True))
    return [
        row
        for row in session.scalars(query)
        if row.job_id in (None, job_id) and (not row.events or event in row.events)
    ]


def _is_due(time: datetime, pauses: Sequence[timedelta]) -> ColumnElement[bool]:
    """Of a delivery; `pauses`: before the first, second ... attempt. One that would have to wait for longer than its
    pause was written before the clock was set back."""
    too_far = [
        and_(DeliveryRecord.attempts == made, DeliveryRecord.next_at > time + pause)
        for made, pause in enumerate(pauses)
    ]
    return and_(DeliveryRecord.status == "pending", or_(DeliveryRecord.next_at <= time, *too_far))


def due(session: Session, time: datetime, pauses: Sequence[timedelta], limit: int) -> list[WebhookRecord]:
    """Webhooks with a pending delivery whose time has come, those that have waited longest first. `pauses` are those
    before the first, second ... attempt."""
    waiting = (
        select(DeliveryRecord.webhook_id, func.min(DeliveryRecord.id).label("first"))
        .where(_is_due(time, pauses))
        .group_by(DeliveryRecord.webhook_id)
        .subquery()
    )
    query = select(WebhookRecord).join(waiting, WebhookRecord.id == waiting.c.webhook_id)
    return list(session.scalars(query.order_by(waiting.c.first).limit(limit)))


def next_due(session: Session, webhook_id: str, time: datetime, pauses: Sequence[timedelta]) -> DeliveryRecord | None:
    """Its oldest pending delivery whose time has come."""
    query = select(DeliveryRecord).where(DeliveryRecord.webhook_id == webhook_id, _is_due(time, pauses))
    return session.scalar(query.order_by(DeliveryRecord.id).limit(1))


def deliveries(session: Session, webhook_id: str, limit: int, before: int | None) -> list[DeliveryRecord]:
    """Newest first, those with an id below `before`."""
    query = select(DeliveryRecord).where(DeliveryRecord.webhook_id == webhook_id)
    if before is not None:
        query = query.where(DeliveryRecord.id < before)
    return list(session.scalars(query.order_by(DeliveryRecord.id.desc()).limit(limit)))


def drop_before(session: Session, time: datetime) -> None:
    """Forget deliveries that are over."""
    session.execute(delete(DeliveryRecord).where(DeliveryRecord.status != "pending", DeliveryRecord.created_at < time))
