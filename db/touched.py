"""Which tables a write transaction writes to, for those who keep something that was made of them.

Rows and statements of the models are seen; SQL as text is not, and neither is what the database does by itself (ON
DELETE CASCADE). Columns that a model names in `__figures__` come anew many times a second: a row of which nothing else
is changed is left out.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import event, inspect
from sqlalchemy.orm import ORMExecuteState, Session

_KEY = "touched"
_UNNOTICED = "harli_unnoticed"


def info() -> dict[str, Any]:
    """What a write session is opened with."""
    return {_KEY: set()}


def unnoticed() -> dict[str, Any]:
    """Execution options of a statement that writes what no one keeps."""
    return {_UNNOTICED: True}


def tables(session: Session) -> frozenset[str]:
    """The names of those that were written to so far."""
    return frozenset(session.info[_KEY])


@event.listens_for(Session, "after_flush")
def _rows(session: Session, _context: object) -> None:
    found: set[str] | None = session.info.get(_KEY)
    if found is not None:
        found.update(row.__tablename__ for rows in (session.new, session.deleted) for row in rows)
        found.update(row.__tablename__ for row in session.dirty if not _only_figures(row))


def _only_figures(row: Any) -> bool:
    figures: Collection[str] = getattr(row, "__figures__", ())
    return bool(figures) and all(
        attribute.key in figures for attribute in inspect(row).attrs if attribute.history.has_changes()
    )


@event.listens_for(Session, "do_orm_execute")
def _statements(state: ORMExecuteState) -> None:
    found: set[str] | None = state.session.info.get(_KEY)
    mapper = state.bind_mapper
    if found is None or mapper is None or state.execution_options.get(_UNNOTICED, False):
        return
    if state.is_insert or state.is_update or state.is_delete:
        found.add(mapper.class_.__tablename__)
