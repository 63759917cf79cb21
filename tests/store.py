"""Fixtures: a data directory, and a store on each of its two databases."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from db.store import Store
from tests import postgres

_numbers = itertools.count()
BOTH = ("sqlite", pytest.param("postgres", marks=pytest.mark.postgres))


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.mkdir()
    return path


@pytest.fixture(scope="session")
def postgres_host() -> Iterator[str]:
    """The socket folder of a PostgreSQL server."""
    with postgres.server() as host:
        yield host


@contextmanager
def _database(host: str, template: str = "template1") -> Iterator[str]:
    """A database of its own, a copy of the template; its name."""
    name = f"harli_{next(_numbers)}"
    with psycopg.connect(host=host, user="harli", dbname="postgres", autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        yield name
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


def _url(host: str, name: str) -> str:
    return f"postgresql://harli@/{name}?host={host}"


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated store without rows."""
    path = tmp_path_factory.mktemp("template") / "harli.db"
    Store(f"sqlite:///{path}").close()
    return path


@pytest.fixture(scope="session")
def postgres_template(postgres_host: str) -> Iterator[str]:
    """The name of a migrated database without rows."""
    with _database(postgres_host) as name:
        Store(_url(postgres_host, name)).close()
        yield name


@pytest.fixture(params=BOTH)
def empty_url(request: pytest.FixtureRequest, data_dir: Path) -> Iterator[str]:
    """The URL of a store without tables, once on each database."""
    if request.param == "sqlite":
        yield f"sqlite:///{data_dir / 'harli.db'}"
        return
    host = request.getfixturevalue("postgres_host")
    with _database(host) as name:
        yield _url(host, name)


@pytest.fixture
def sqlite_url(data_dir: Path, sqlite_template: Path) -> str:
    """The URL of a store of SQLite that is migrated and has no rows, for modules whose queries others try on both."""
    shutil.copy(sqlite_template, data_dir / "harli.db")
    return f"sqlite:///{data_dir / 'harli.db'}"


@pytest.fixture(params=BOTH)
def store_url(request: pytest.FixtureRequest, data_dir: Path) -> Iterator[str]:
    """The URL of a store that is migrated, which takes longer than most tests, and has no rows; once on each
    database."""
    get: Callable[[str], str] = request.getfixturevalue
    if request.param == "sqlite":
        shutil.copy(get("sqlite_template"), data_dir / "harli.db")
        yield f"sqlite:///{data_dir / 'harli.db'}"
        return
    host = get("postgres_host")
    with _database(host, get("postgres_template")) as name:
        yield _url(host, name)


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    opened = Store(store_url)
    yield opened
    opened.close()
