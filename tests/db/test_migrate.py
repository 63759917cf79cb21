"""Migrations make exactly the tables that the models describe, on both databases, also when processes race."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect, text

from core.errors import Conflict, HarliError, Unavailable
from db import migrate
from db.models import metadata
from db.store import Store


@pytest.fixture
def store(empty_url: str) -> Iterator[Store]:
    opened = Store(empty_url)
    yield opened
    opened.close()


def test_models_and_migrations_agree(store: Store) -> None:
    with store.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []


def test_check_constraints_have_the_models_names(store: Store) -> None:
    with store.engine.connect() as connection:
        found = {check["name"] for check in inspect(connection).get_check_constraints("jobs")}
    assert found == {"ck_jobs_state", "ck_jobs_command"}


def test_a_store_that_is_up_to_date_is_left_alone(store: Store) -> None:
    with store.write() as session:
        session.execute(text("CREATE TABLE witness (x INTEGER)"))
    Store(store.url.render_as_string(hide_password=False)).close()
    with store.read() as session:
        assert session.scalar(text("SELECT count(*) FROM witness")) == 0


def test_several_processes_may_start_at_once(empty_url: str) -> None:
    program = f"from db.store import Store; Store({empty_url!r}).close()"
    racers = [subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE) for _ in range(3)]
    for racer in racers:
        _, errors = racer.communicate(timeout=120)
        assert racer.returncode == 0, errors.decode()
    store = Store(empty_url)
    with store.read() as session:
        assert session.scalar(text("SELECT count(*) FROM alembic_version")) == 1
    store.close()


def test_a_store_made_by_a_newer_version_is_refused(store: Store) -> None:
    with store.write() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999_future'"))
    with pytest.raises(Conflict, match="9999_future"):
        Store(store.url.render_as_string(hide_password=False))


def test_the_migration_can_be_undone(store: Store) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(migrate.FOLDER))
    with store.write() as session:
        connection = session.connection()
        config.attributes["connection"] = connection
        command.downgrade(config, "base")
        assert inspect(connection).get_table_names() == ["alembic_version"]


@pytest.mark.parametrize("url", ["nonsense", "mysql://user@host/harli", "sqlite://", "sqlite:///:memory:"])
def test_a_url_that_is_no_store_is_refused_with_what_to_give(url: str) -> None:
    with pytest.raises(HarliError, match="HARLI_DATABASE_URL"):
        Store(url)


def test_a_server_that_does_not_answer_is_named_without_its_password() -> None:
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1") as caught:
        Store("postgresql://user:secret@127.0.0.1:1/harli")
    assert "secret" not in caught.value.message
