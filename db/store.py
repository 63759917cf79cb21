"""Opening the store, and its two kinds of transaction.

SQLite (WAL) or PostgreSQL, by URL. A read transaction cannot write: its connection cannot. With PostgreSQL each of its
queries stands alone, which is all that READ COMMITTED promises, and saves the round trips of BEGIN and ROLLBACK. Write
transactions come one after the other: SQLite takes its write lock at BEGIN IMMEDIATE (a deferred transaction that reads
first and writes later fails at once, whatever busy_timeout says), PostgreSQL an advisory lock, so that what one has
read is still true when it writes.
"""

from __future__ import annotations

import contextlib
import copy
import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, InterfaceError, InvalidatePoolError, OperationalError
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
_READERS = 48
_MAPPED_BYTES = 1 << 28
# A connection that was used a moment ago and has nothing to say is taken to be there still.
_PING_AFTER_S = 30.0
_USED = "harli_used"


class Store:
    """An open, migrated store. Sessions are short: one per transaction."""

    def __init__(self, url: str) -> None:
        self.url = _checked(url)
        self._writing = _writing(self.url)
        self._reading = _reading(self.url)
        self._listeners: list[Callable[[frozenset[str]], None]] = []
        self._scope: Scope | None = None
        self._actor: Actor | None = None
        try:
            migrate.upgrade(self._writing)
        except OperationalError as error:
            self.close()
            shown = self.url.render_as_string(hide_password=True)
            raise Unavailable(
                "store_unreachable",
                f"the store at {shown} cannot be opened: {error.orig}; check HARLI_DATABASE_URL and HARLI_DATA_DIR",
                "database_url",
            ) from error

    @property
    def dialect(self) -> str:
        return self._reading.dialect.name

    @property
    def engine(self) -> Engine:
        """Of the connections that read."""
        return self._reading

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
        """The only write transaction of the store at this moment; commits at the end, rolls back on any exception. One
        within another of the same thread would wait for itself."""
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
        self._reading.dispose()
        self._writing.dispose()


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


def _reading(url: URL) -> Engine:
    """An engine whose connections cannot write."""
    if url.get_backend_name() == "sqlite":
        # Each commit of a writer empties the readers' caches of pages; a mapped file is read without them.
        engine = _sqlite(url, _READERS, "PRAGMA query_only = ON", f"PRAGMA mmap_size = {_MAPPED_BYTES}")
        event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
        return engine
    engine = _postgresql(url, _READERS, isolation_level="AUTOCOMMIT", skip_autocommit_rollback=True)
    event.listen(engine, "connect", _read_only)
    return engine


def _writing(url: URL) -> Engine:
    """An engine with one connection: the writers of a process wait for it in a queue, and not for the database's lock,
    which SQLite has them ask for again and again."""
    if url.get_backend_name() == "sqlite":
        assert url.database is not None
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)
        engine = _sqlite(url, 1, "PRAGMA journal_mode = WAL")
    else:
        engine = _postgresql(url, 1)
    event.listen(engine, "begin", _lock)
    return engine


def _sqlite(url: URL, connections: int, *pragmas: str) -> Engine:
    def prepare(connection: Any, _record: object) -> None:
        # None: the driver starts no transactions of its own, the listeners to "begin" do.
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {_BUSY_TIMEOUT_MS}")
        cursor.execute("PRAGMA synchronous = NORMAL")
        cursor.execute("PRAGMA foreign_keys = ON")
        for pragma in pragmas:
            cursor.execute(pragma)
        cursor.close()

    engine = create_engine(url, pool_size=connections, max_overflow=0)
    event.listen(engine, "connect", prepare)
    return engine


def _postgresql(url: URL, connections: int, **more: Any) -> Engine:
    engine = create_engine(url, pool_size=connections, max_overflow=0, **more)

    def returned(_connection: object, record: Any) -> None:
        record.info[_USED] = time.monotonic()

    def taken(connection: Any, record: Any, _proxy: object) -> None:
        """Asks a connection whether it lives where that is in doubt: it was idle for long, or, though nothing was asked
        of it, there is something to read, as when the server has closed it."""
        used = record.info.get(_USED)
        if used is None:
            return
        socket = select.poll()
        socket.register(connection.fileno(), select.POLLIN)
        if time.monotonic() - used > _PING_AFTER_S or socket.poll(0):
            try:
                engine.dialect.do_ping(connection)
            except engine.dialect.loaded_dbapi.Error as error:
                raise InvalidatePoolError(str(error)) from error

    event.listen(engine, "checkin", returned)
    event.listen(engine, "checkout", taken)
    return engine


def _read_only(connection: Any, _record: object) -> None:
    connection.execute("SET default_transaction_read_only = on")


def _lock(connection: Connection) -> None:
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    else:
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({WRITER_LOCK})")
