"""Leases with fencing tokens: who may do a thing, until when, and under which number.

A token grows with every change of holder and never comes twice; what is done under an old one is refused.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import String, bindparam, select, text
from sqlalchemy.orm import Mapped, Session, mapped_column

from db.base import Base, now


class LeaseRecord(Base):
    __tablename__ = "leases"

    name: Mapped[str] = mapped_column(String(40), primary_key=True)
    holder: Mapped[str | None] = mapped_column(String(120))
    token: Mapped[int] = mapped_column(default=0)
    expires_at: Mapped[datetime]


_OF = LeaseRecord.table().c
_HELD = select(_OF.token).where(_OF.name == bindparam("lease"), _OF.holder == bindparam("by"))


def store_time(session: Session) -> datetime:
    """The time by which leases run out: PostgreSQL's, which API processes on several machines share; with SQLite there
    is but one machine."""
    if session.get_bind().dialect.name == "postgresql":
        value = session.scalar(text("SELECT clock_timestamp()"))
        assert isinstance(value, datetime)
        return value
    return now()


def acquire(session: Session, name: str, holder: str, duration_s: float) -> int | None:
    """Take or renew a lease in a write transaction: its token, or None while someone else holds it.

    One that ends later than a lease can that is taken now is from before the clock was set back. It may be held still,
    so that it is not taken away but cut: who holds it renews it in time."""
    time = store_time(session)
    lease = session.get(LeaseRecord, name)
    if lease is None:
        lease = LeaseRecord(name=name, holder=None, token=0, expires_at=time)
        session.add(lease)
    if lease.holder != holder:
        if lease.holder is not None:
            lease.expires_at = min(lease.expires_at, time + timedelta(seconds=duration_s))
            if lease.expires_at > time:
                return None
        lease.holder = holder
        lease.token += 1
    lease.expires_at = time + timedelta(seconds=duration_s)
    return lease.token


def release(session: Session, name: str, holder: str) -> None:
    """Let go of a lease, so that the next one need not wait for its end."""
    lease = session.get(LeaseRecord, name)
    if lease is not None and lease.holder == holder:
        lease.holder = None


def holds(session: Session, name: str, holder: str, token: int) -> bool:
    """Whether the lease is still held under this token (its time may be over, as long as no one else took it)."""
    session.flush()  # a statement of the table does not see to it
    return session.connection().scalar(_HELD, {"lease": name, "by": holder}) == token


def next_token(session: Session, name: str, holder: str) -> int:
    """Hand the lease to `holder` under a new token, whoever had it."""
    time = store_time(session)
    lease = session.get(LeaseRecord, name)
    if lease is None:
        lease = LeaseRecord(name=name, token=0)
        session.add(lease)
    lease.holder = holder
    lease.token += 1
    lease.expires_at = time
    return lease.token
