"""Opening the store, and its two kinds of transaction.

SQLite (WAL) or PostgreSQL, by URL. A read transaction cannot write. Write transactions come one after the other: SQLite
takes its write lock at BEGIN IMMEDIATE (a deferred transaction that reads first and writes later fails at once,
whatever busy_timeout says), PostgreSQL an advisory lock, so that what one has read is still true when it writes.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session

from core.errors import HarliError, Unavailable
from db import audit, migrate, scope, touched
from db.audit import Actor
from db.scope import Scope

# What is raised while the database is away or does not keep up: trying again may help, and changes nothing else.
OUTAGE = (OperationalError, InterfaceError, PoolTimeout)
WRITER_LOCK = 0x4841524C49
_BUSY_TIMEOUT_MS = 15_000
_POOL = 48


class Store:
    """An open, migrated store. Sessions are short: one per transaction."""

    def __init__(self, url: str) -> None:
        self.url = _checked(url)
        self._engine = _engine(self.url)
        self._reading = self._engine.execution_options(harli_write=False, postgresql_readonly=True)
        self._writing = self._engine.execution_options(harli_write=True)
        self._listeners: list[Callable[[frozenset[str]], None]] = []
        self._scope: Scope | None = None
        self._actor: Actor | None = None
        try:
            migrate.upgrade(self._writing)
        except OperationalError as error:
            self._engine.dispose()
            shown = self.url.render_as_string(hide_password=True)
            raise Unavailable(
                "store_unreachable",
                f"the store at {shown} cannot be opened: {error.orig}; check HARLI_DATABASE_URL and HARLI_DATA_DIR",
                "database_url",
            ) from error

    @property
    def dialect(self) -> str:
        return self._engine.dialect.name

    @property
    def engine(self) -> Engine:
        return self._engine

    def within(self, scope: Scope, actor: Actor | None) -> Self:
        """The same store as seen in a scope; what is changed through it is written to the audit log as `actor`'s."""
        view = copy.copy(self)
        view._scope, view._actor = scope, actor
        return view

    @contextlib.contextmanager
    def read(self) -> Iterator[Session]:
        """A transaction that only reads; to write in it is an error."""
        info = scope.info(self._scope)
        with Session(self._reading, autoflush=False, expire_on_commit=False, info=info) as session:
            yield session

    @contextlib.contextmanager
    def write(self) -> Iterator[Session]:
        """The only write transaction of the store at this moment; commits at the end, rolls back on any exception."""
        info = scope.info(self._scope) | audit.info(self._actor) | touched.info()
        with Session(self._writing, expire_on_commit=False, info=info) as session, session.begin():
            yield session
            noted = self._actor is not None and audit.done(session, self._actor)
        if noted and self._actor is not None:
            self._actor.noted = True
        tables = touched.tables(session)
        for listener in self._listeners:
            listener(tables)

    def on_commit(self, listener: Callable[[frozenset[str]], None]) -> None:
        """Call `listener` with the tables that were written to (none, if there was nothing to write after all) after
        each write transaction of this process, on its thread; it must be quick and not raise."""
        self._listeners.append(listener)

    def close(self) -> None:
        self._engine.dispose()


def _checked(url: str) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise HarliError(
            "database_url",
            "HARLI_DATABASE_URL is not a SQLAlchemy URL such as postgresql://user@host/harli",
            "database_url",
        ) from error
    backend = {"postgres": "postgresql"}.get(parsed.get_backend_name(), parsed.get_backend_name())
    if backend == "postgresql":
        return parsed.set(drivername="postgresql+psycopg")
    if backend == "sqlite" and parsed.database and parsed.database != ":memory:":
        return parsed
    raise HarliError(
        "database_url",
        f"HARLI_DATABASE_URL names {parsed.render_as_string(hide_password=True)}; the store takes a file of SQLite "
        "(sqlite:////path/harli.db) or PostgreSQL (postgresql://user@host/harli)",
        "database_url",
    )


def _engine(url: URL) -> Engine:
    if url.get_backend_name() == "sqlite":
        assert url.database is not None
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)
        engine = create_engine(url, pool_size=_POOL, max_overflow=0)
        event.listen(engine, "connect", _prepare_sqlite)
    else:
        engine = create_engine(url, pool_size=_POOL // 2, max_overflow=_POOL // 2, pool_pre_ping=True)
    event.listen(engine, "begin", _begin)
    return engine


def _prepare_sqlite(connection: Any, _record: object) -> None:
    # None: the driver starts no transactions of its own, `_begin` does.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {_BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = NORMAL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin(connection: Connection) -> None:
    write = connection.get_execution_options().get("harli_write", False)
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql(f"PRAGMA query_only = {0 if write else 1}")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
    elif write:
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({WRITER_LOCK})")
