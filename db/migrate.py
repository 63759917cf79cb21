"""Bringing the store's tables to this version, at start. Safe when several processes start at once: the migration runs
in one write transaction, so a second process waits for it and finds nothing left to do."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine

from core.errors import Conflict

FOLDER = Path(__file__).resolve().parent.parent / "migrations"


def upgrade(engine: Engine) -> None:
    """Migrate to the newest revision. `engine` begins write transactions.

    Raises Conflict when the store was made by a newer Harli than this one.
    """
    config = Config()
    config.set_main_option("script_location", str(FOLDER))
    scripts = ScriptDirectory.from_config(config)
    with engine.begin() as connection:
        found = MigrationContext.configure(connection).get_current_revision()
        if found == scripts.get_current_head():
            return
        known = {script.revision for script in scripts.walk_revisions()}
        if found is not None and found not in known:
            raise Conflict(
                "store_too_new",
                f"the store is at revision {found}, which this version of Harli does not know; use the version that "
                "made it, or another database",
                "database_url",
            )
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
