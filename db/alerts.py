"""Alerts: rules on figures, and what came of them."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from sqlalchemy import CheckConstraint, String, Text, delete, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from db.base import Base, BigId

STATES = ("pending", "firing", "resolved")
OPEN = ("pending", "firing")


class AlertRuleRecord(Base):
    """The figure `metric` (over the last `window_s` seconds) is `comparison` (above, below) `threshold` for `for_s`
    seconds."""

    __tablename__ = "alert_rules"

    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    metric: Mapped[str] = mapped_column(String(40))
    comparison: Mapped[str] = mapped_column(String(8))
    threshold: Mapped[float]
    window_s: Mapped[float]
    for_s: Mapped[float]
    severity: Mapped[str] = mapped_column(String(8))
    enabled: Mapped[bool]
    updated_at: Mapped[datetime]


class AlertRecord(Base):
    """One time that a rule's condition held; `value` is the figure when its state changed last."""

    __tablename__ = "alerts"
    __table_args__ = (
        CheckConstraint("state IN ({})".format(", ".join(f"'{state}'" for state in STATES)), name="state"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    rule: Mapped[str] = mapped_column(String(63))
    severity: Mapped[str] = mapped_column(String(8))
    state: Mapped[str] = mapped_column(String(8), index=True)
    value: Mapped[float | None]
    message: Mapped[str] = mapped_column(Text)
    began_at: Mapped[datetime]
    fired_at: Mapped[datetime | None]
    resolved_at: Mapped[datetime | None]


def rules(session: Session) -> list[AlertRuleRecord]:
    return list(session.scalars(select(AlertRuleRecord).order_by(AlertRuleRecord.name)))


def open_ones(session: Session) -> dict[str, AlertRecord]:
    """Those that are pending or firing, by rule."""
    found = session.scalars(select(AlertRecord).where(AlertRecord.state.in_(OPEN)).order_by(AlertRecord.id))
    return {record.rule: record for record in found}


def page(session: Session, limit: int, before: int | None, states: Collection[str]) -> list[AlertRecord]:
    """Newest first, of these states or all, those with an id below `before`."""
    query = select(AlertRecord).order_by(AlertRecord.id.desc()).limit(limit)
    if states:
        query = query.where(AlertRecord.state.in_(states))
    if before is not None:
        query = query.where(AlertRecord.id < before)
    return list(session.scalars(query))


def drop_before(session: Session, time: datetime) -> None:
    session.execute(delete(AlertRecord).where(AlertRecord.resolved_at < time))
