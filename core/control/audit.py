"""The audit log: reading it, and what the API adds of requests that changed nothing."""

from __future__ import annotations

from datetime import datetime

from core.api import tenant_schemas as schemas
from core.api.schemas import Page
from core.control import pages
from core.control.context import Control
from db import audit as rows
from db.audit import Actor


def page(
    control: Control,
    limit: int,
    cursor: str | None,
    *,
    user: str | None = None,
    tenant: str | None = None,
    outcome: str | None = None,
    text: str | None = None,
    since: datetime | None = None,
) -> Page[schemas.AuditEntry]:
    """Newest first, what all given filters let through."""
    before = pages.key(cursor, int)
    with control.store.read() as session:
        found = rows.page(session, limit + 1, before, user=user, tenant=tenant, outcome=outcome, text=text, since=since)
    following = pages.cursor(found[limit - 1].id) if len(found) > limit else None
    items = [schemas.AuditEntry.model_validate(record, from_attributes=True) for record in found[:limit]]
    return Page(items=items, next=following)


def note(control: Control, actor: Actor, status: int, code: str | None) -> None:
    """A request that was to change something and changed nothing, or broke off."""
    with control.store.write() as session:
        rows.refused(session, actor, status, code)
