"""Alembic's entry: migrates over the connection it is given (at start), or (from a shell) over the settings' store."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, create_engine

from core.config import Settings
from db.models import metadata


def run(connection: Connection) -> None:
    context.configure(
        connection=connection, target_metadata=metadata, compare_type=True, transactional_ddl=True, render_as_batch=True
    )
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    with create_engine(Settings().resolved_database_url).begin() as own:
        run(own)
