"""Tenants, users, API tokens and the audit log; whose data sets, adapters and jobs are."""

from __future__ import annotations

from datetime import UTC, datetime

import sqlalchemy as sa
from alembic import op

revision = "0002_tenants"
down_revision = "0001_store"
branch_labels = None
depends_on = None

_OWNED = ("adapters", "datasets", "jobs")


def upgrade() -> None:
    tenants = op.create_table(
        "tenants",
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("suspended", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_tenants"),
    )
    op.bulk_insert(tenants, [{"name": "default", "created_at": datetime.now(UTC), "suspended": False}])
    op.create_table(
        "users",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant", sa.String(length=63), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("role", sa.String(length=12), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("disabled", sa.Boolean(), nullable=False),
        sa.CheckConstraint("role IN ('viewer', 'operator', 'admin')", name=op.f("ck_users_role")),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.name"], name="fk_users_tenant_tenants"),
        sa.PrimaryKeyConstraint("id", name="pk_users"),
        sa.UniqueConstraint("tenant", "name", name="uq_users_tenant_name"),
    )
    op.create_table(
        "api_tokens",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant", sa.String(length=63), nullable=False),
        sa.Column("user_id", sa.String(length=40), nullable=False),
        sa.Column("name", sa.String(length=120), nullable=False),
        sa.Column("hint", sa.String(length=16), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("scopes", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.name"], name="fk_api_tokens_tenant_tenants"),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name="fk_api_tokens_user_id_users", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_api_tokens"),
        sa.UniqueConstraint("sha256", name="uq_api_tokens_sha256"),
    )
    op.create_index("ix_api_tokens_tenant", "api_tokens", ["tenant"], unique=False)
    op.create_index("ix_api_tokens_user_id", "api_tokens", ["user_id"], unique=False)
    op.create_table(
        "audit",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("tenant", sa.String(length=63), nullable=False),
        sa.Column("user", sa.String(length=63), nullable=False),
        sa.Column("token_id", sa.String(length=40), nullable=True),
        sa.Column("address", sa.String(length=64), nullable=True),
        sa.Column("action", sa.String(length=200), nullable=False),
        sa.Column("ref", sa.String(length=200), nullable=True),
        sa.Column("outcome", sa.String(length=8), nullable=False),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("code", sa.String(length=80), nullable=True),
        sa.Column("changes", sa.JSON(none_as_null=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_audit_time", "audit", ["time"], unique=False)
    op.create_index("ix_audit_tenant", "audit", ["tenant"], unique=False)
    for table in _OWNED:
        op.add_column(table, sa.Column("tenant", sa.String(length=63), nullable=False, server_default="default"))
    op.add_column("changes", sa.Column("tenant", sa.String(length=63), nullable=True))
    with op.batch_alter_table("datasets", table_kwargs={"sqlite_autoincrement": True}) as batch:
        batch.drop_constraint("uq_datasets_name_version", type_="unique")
        batch.create_unique_constraint("uq_datasets_tenant_name_version", ["tenant", "name", "version"])
    op.create_index("ix_jobs_tenant_seq", "jobs", ["tenant", "seq"], unique=False)
    # The keys are forgotten after a day anyway.
    op.drop_table("idempotency_keys")
    _idempotency_keys(sa.Column("tenant", sa.String(length=63), nullable=False))


def _idempotency_keys(*more: sa.Column[str]) -> None:
    op.create_table(
        "idempotency_keys",
        *more,
        sa.Column("key", sa.String(length=255), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("job_id", sa.String(length=40), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint(*(column.name for column in more), "key", name="pk_idempotency_keys"),
    )
    op.create_index("ix_idempotency_keys_created_at", "idempotency_keys", ["created_at"], unique=False)


def downgrade() -> None:
    op.drop_table("idempotency_keys")
    _idempotency_keys()
    op.drop_index("ix_jobs_tenant_seq", "jobs")
    with op.batch_alter_table("datasets", table_kwargs={"sqlite_autoincrement": True}) as batch:
        batch.drop_constraint("uq_datasets_tenant_name_version", type_="unique")
        batch.create_unique_constraint("uq_datasets_name_version", ["name", "version"])
    for table in ("changes", *_OWNED):
        with op.batch_alter_table(table) as batch:
            batch.drop_column("tenant")
    for table in ("audit", "api_tokens", "users", "tenants"):
        op.drop_table(table)
