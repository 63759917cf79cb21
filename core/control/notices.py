"""Notices: what people should know of the engine, kept for two weeks."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy.orm import Session

from core.api import schemas
from core.control import pages
from core.control.context import Control
from db import changes
from db import notices as rows
from db.notices import NoticeRecord


def add(session: Session, engine_id: str, level: str, code: str, message: str, time: datetime) -> None:
    """Keep a notice, and tell those who listen."""
    record = NoticeRecord(engine_id=engine_id, time=time, level=level, code=code, message=message)
    session.add(record)
    changes.add(session, "engine", "notice", engine_id, level=level, code=code, message=message)


def page(control: Control, limit: int, cursor: str | None, codes: tuple[str, ...]) -> schemas.Page[schemas.Notice]:
    """Newest first, of some codes or all."""
    before = pages.key(cursor, int)
    with control.store.read() as session:
        found = rows.last(session, limit + 1, codes=codes, before=before)
    following = pages.cursor(found[limit - 1].id) if len(found) > limit else None
    return schemas.Page(items=[view(record) for record in found[:limit]], next=following)


def view(record: NoticeRecord) -> schemas.Notice:
    return schemas.Notice.model_validate(record, from_attributes=True)
