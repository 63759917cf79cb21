"""Aliases of adapters, where an adapter comes from, content hashes of data sets, operations with progress."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005_intake"
down_revision = "0004_notices_alerts"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("datasets", sa.Column("content_sha256", sa.String(length=64), nullable=True))
    op.add_column("adapter_versions", sa.Column("base", sa.String(length=255), nullable=True))
    op.add_column("adapter_versions", sa.Column("parents", sa.JSON(none_as_null=True), nullable=True))
    op.execute("UPDATE adapter_versions SET origin = 'imported' WHERE origin = 'uploaded'")
    op.create_table(
        "adapter_aliases",
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("alias", sa.String(length=31), nullable=False),
        sa.Column("tenant", sa.String(length=63), nullable=False),
        sa.Column("history", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("wanted_version", sa.Integer(), nullable=True),
        sa.Column("deployed_version", sa.Integer(), nullable=True),
        sa.Column("engine_id", sa.String(length=120), nullable=True),
        sa.Column("deployment", sa.String(length=12), nullable=False),
        sa.Column("deleted", sa.Boolean(), nullable=False),
        sa.Column("error", sa.JSON(none_as_null=True), nullable=True),
        sa.CheckConstraint(
            "deployment IN ('none', 'loading', 'deployed', 'unloading', 'failed')",
            name=op.f("ck_adapter_aliases_deployment"),
        ),
        sa.PrimaryKeyConstraint("name", "alias", name="pk_adapter_aliases"),
    )
    op.create_table(
        "operations",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=63), nullable=False),
        sa.Column("kind", sa.String(length=12), nullable=False),
        sa.Column("subject", sa.String(length=200), nullable=False),
        sa.Column("state", sa.String(length=12), nullable=False),
        sa.Column("done", sa.BigInteger(), nullable=False),
        sa.Column("total", sa.BigInteger(), nullable=False),
        sa.Column("cancel", sa.Boolean(), nullable=False),
        sa.Column("worker", sa.String(length=120), nullable=False),
        sa.Column("result", sa.String(length=200), nullable=True),
        sa.Column("error", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("kind IN ('dataset', 'merge')", name=op.f("ck_operations_kind")),
        sa.CheckConstraint(
            "state IN ('running', 'succeeded', 'failed', 'cancelled')", name=op.f("ck_operations_state")
        ),
        sa.PrimaryKeyConstraint("id", name="pk_operations"),
    )


def downgrade() -> None:
    op.drop_table("operations")
    op.drop_table("adapter_aliases")
    op.execute("UPDATE adapter_versions SET origin = 'uploaded' WHERE origin IN ('imported', 'merged')")
    with op.batch_alter_table("adapter_versions") as versions:
        versions.drop_column("parents")
        versions.drop_column("base")
    with op.batch_alter_table("datasets", table_kwargs={"sqlite_autoincrement": True}) as datasets:
        datasets.drop_column("content_sha256")
