"""Fixtures: a data directory, and a store on each of its two databases."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from db.store import Store
from tests import postgres

_numbers = itertools.count()


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


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def store_url(request: pytest.FixtureRequest, data_dir: Path) -> Iterator[str]:
    """The URL of an empty store, once on each database."""
    if request.param == "sqlite":
        yield f"sqlite:///{data_dir / 'harli.db'}"
        return
    host = request.getfixturevalue("postgres_host")
    name = f"harli_{next(_numbers)}"
    with psycopg.connect(host=host, user="harli", dbname="postgres", autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}")
        yield f"postgresql://harli@/{name}?host={host}"
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    opened = Store(store_url)
    yield opened
    opened.close()
