"""The audit log: who changed what, when, from where, and what came of it. Rows are only ever added, and dropped by
age."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import String, delete, event, inspect, or_, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from db.base import Base, BigId, now
from db.scope import Owned

_KEY = "audit"
# Tables that follow from a change, or are figures of their own.
_NOT_CHANGES = frozenset(
    {
        "audit",
        "changes",
        "idempotency_keys",
        "job_events",
        "job_logs",
        "job_metrics",
        "job_samples",
        "finetune_usage",
        "leases",
        "operations",
        "telemetry",
        "webhook_deliveries",
    }
)
_LONGEST = 200
_MOST_FIELDS = 40


@dataclass
class Actor:
    """Who does something by which request. `action` is method and route, `ref` what the path names; `noted`: what it
    did stands in the log."""

    tenant: str
    user: str
    token_id: str | None
    address: str | None
    action: str
    ref: str | None
    noted: bool = False


class AuditRecord(Owned, Base):
    """`tenant` is the actor's. `outcome`: done, refused (4xx) or failed (5xx), with the answer's status and error code.
    `changes`: per row ``{"table", "id", "change": added | changed | deleted, "fields": {name: [before, after]}}``."""

    __tablename__ = "audit"
    __table_args__ = ({"sqlite_autoincrement": True},)

    id: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    time: Mapped[datetime] = mapped_column(index=True)
    tenant: Mapped[str] = mapped_column(String(63), index=True)
    user: Mapped[str] = mapped_column(String(63))
    token_id: Mapped[str | None] = mapped_column(String(40))
    address: Mapped[str | None] = mapped_column(String(64))
    action: Mapped[str] = mapped_column(String(200))
    ref: Mapped[str | None] = mapped_column(String(200))
    outcome: Mapped[str] = mapped_column(String(8))
    status: Mapped[int | None]
    code: Mapped[str | None] = mapped_column(String(80))
    changes: Mapped[list[Any]]


def info(actor: Actor | None) -> dict[str, Any]:
    """What a write session is opened with, so that what it changes is kept for `done`."""
    return {} if actor is None else {_KEY: []}


def done(session: Session, actor: Actor) -> bool:
    """Write down, in the transaction that made them, the changes of a session; False when there are none."""
    session.flush()
    changes = session.info[_KEY]
    if changes:
        _add(session, actor, "done", None, None, changes)
    return bool(changes)


def refused(session: Session, actor: Actor, status: int, code: str | None) -> None:
    """A request that changed nothing: `done` when it was answered well all the same."""
    outcome = "done" if status < 400 else "refused" if status < 500 else "failed"
    _add(session, actor, outcome, status, code, [])


def _add(
    session: Session, actor: Actor, outcome: str, status: int | None, code: str | None, changes: list[Any]
) -> None:
    session.add(
        AuditRecord(
            time=now(),
            tenant=actor.tenant,
            user=actor.user,
            token_id=actor.token_id,
            address=actor.address,
            action=actor.action[:200],
            ref=actor.ref[:200] if actor.ref is not None else None,
            outcome=outcome,
            status=status,
            code=code,
            changes=changes,
        )
    )


def page(
    session: Session,
    limit: int,
    before: int | None,
    *,
    user: str | None = None,
    tenant: str | None = None,
    outcome: str | None = None,
    text: str | None = None,
    since: datetime | None = None,
) -> list[AuditRecord]:
    """Newest first, those with an id below `before`; `text` is looked for in action and ref."""
    query = select(AuditRecord).order_by(AuditRecord.id.desc()).limit(limit)
    if before is not None:
        query = query.where(AuditRecord.id < before)
    for column, value in ((AuditRecord.user, user), (AuditRecord.tenant, tenant), (AuditRecord.outcome, outcome)):
        if value is not None:
            query = query.where(column == value)
    if text is not None:
        query = query.where(
            or_(AuditRecord.action.icontains(text, autoescape=True), AuditRecord.ref.icontains(text, autoescape=True))
        )
    if since is not None:
        query = query.where(AuditRecord.time >= since)
    return list(session.scalars(query))


def drop_before(session: Session, time: datetime) -> None:
    session.execute(delete(AuditRecord).where(AuditRecord.time < time))


# ---- what a session changes ------------------------------------------------------------------------------------------


@event.listens_for(Session, "after_flush")
def _collect(session: Session, _context: object) -> None:
    """Rows and fields, while the session still knows what they were."""
    changes: list[dict[str, Any]] | None = session.info.get(_KEY)
    if changes is None:
        return
    for change, rows in (("added", session.new), ("changed", session.dirty), ("deleted", session.deleted)):
        changes.extend(_described(rows, change))


def _described(rows: Iterable[Any], change: str) -> Iterable[dict[str, Any]]:
    for row in rows:
        if row.__tablename__ in _NOT_CHANGES:
            continue
        fields: dict[str, list[Any]] = {}
        for attribute in inspect(type(row)).column_attrs:
            column = attribute.columns[0]
            history = inspect(row).attrs[attribute.key].history
            current = _small(getattr(row, attribute.key))
            before = _small(history.deleted[0]) if history.deleted else None
            if change == "changed":
                if history.has_changes() and before != current:
                    fields[attribute.key] = ["…", "…"] if _is_secret(column) else [before, current]
            elif not _is_secret(column) and current is not None:
                fields[attribute.key] = [None, current] if change == "added" else [current, None]
        if fields or change != "changed":
            shown = dict(list(fields.items())[:_MOST_FIELDS])
            yield {"table": row.__tablename__, "id": _name(row), "change": change, "fields": shown}


def _name(row: Any) -> str:
    named = getattr(row, "id", None)
    return str(named) if named is not None else "/".join(map(str, inspect(type(row)).primary_key_from_instance(row)))


def _is_secret(column: Any) -> bool:
    return bool(column.info.get("secret")) or any(word in column.name for word in ("secret", "password"))


def _small(value: Any) -> Any:
    """The value where it is small enough to be read, an ellipsis where it is not."""
    if isinstance(value, datetime):
        return value.isoformat()
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return value if len(value) <= _LONGEST else f"{value[:_LONGEST]}…"
    if isinstance(value, dict | list):
        return value if len(str(value)) <= _LONGEST else "…"
    return "…"
