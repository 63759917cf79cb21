"""Which tables a write transaction writes to, for those who keep something that was made of them.

Rows and statements of the models are seen; statements of their tables are not (who executes one says so by `note`),
nor is what the database does by itself (ON DELETE CASCADE).
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import event
from sqlalchemy.orm import ORMExecuteState, Session

_KEY = "touched"
_UNNOTICED = "harli_unnoticed"


def info() -> dict[str, Any]:
    """What a write session is opened with."""
    return {_KEY: set()}


def unnoticed() -> dict[str, Any]:
    """Execution options of a statement that writes what no one keeps."""
    return {_UNNOTICED: True}


def note(session: Session, *written: str) -> None:
    """Add tables, by name, that a statement writes to unseen."""
    found: set[str] | None = session.info.get(_KEY)
    if found is not None:
        found.update(written)


def tables(session: Session) -> frozenset[str]:
    """The names of those that were written to so far."""
    return frozenset(session.info[_KEY])


@event.listens_for(Session, "after_flush")
def _rows(session: Session, _context: object) -> None:
    note(session, *(row.__tablename__ for rows in (session.new, session.dirty, session.deleted) for row in rows))


@event.listens_for(Session, "do_orm_execute")
def _statements(state: ORMExecuteState) -> None:
    found: set[str] | None = state.session.info.get(_KEY)
    mapper = state.bind_mapper
    if found is None or mapper is None or state.execution_options.get(_UNNOTICED, False):
        return
    if state.is_insert or state.is_update or state.is_delete:
        found.add(mapper.class_.__tablename__)
