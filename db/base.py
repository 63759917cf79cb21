"""What all models share: the declarative base, UTC times, the names of constraints."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, DateTime, Integer, MetaData, Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase
from sqlalchemy.types import TypeDecorator


def now() -> datetime:
    return datetime.now(UTC)


# Of rows that come without end; SQLite counts up in INTEGER only, which has 64 bits there.
BigId = BigInteger().with_variant(Integer(), "sqlite")


class UtcDateTime(TypeDecorator[datetime]):
    """A time in UTC. SQLite stores no zone, so it is put back on the way out; a time without a zone is refused."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is not None and value.tzinfo is None:
            raise ValueError(f"the time {value} has no zone")
        return None if value is None else value.astimezone(UTC)

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], datetime | None]:
        """For each of thousands of values a second, so that it is one step and not the three of the type below."""
        return _of_text if dialect.name == "sqlite" else _of_time


def _of_text(stored: str | None) -> datetime | None:
    return None if stored is None else datetime.fromisoformat(f"{stored}+00:00")


def _of_time(stored: datetime | None) -> datetime | None:
    return None if stored is None else stored.astimezone(UTC)


class Base(DeclarativeBase):
    """A model. What is done many times a second is a statement of its `table`, which SQLAlchemy is through with sooner;
    `db.scope` and `db.touched` do not see it."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads it off the class
        datetime: UtcDateTime(),
        dict[str, Any]: JSON(none_as_null=True),
        list[Any]: JSON(none_as_null=True),
    }

    @classmethod
    def table(cls) -> Table:
        assert isinstance(cls.__table__, Table)
        return cls.__table__


def upsert(table: Table, dialect: str) -> sqlite.Insert | postgresql.Insert:
    """An INSERT that can be told what to do about a row that is there already (`on_conflict_do_update`)."""
    return sqlite.insert(table) if dialect == "sqlite" else postgresql.insert(table)
