"""The store's first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001_store"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "adapters",
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_version", sa.Integer(), nullable=False),
        sa.Column("wanted_version", sa.Integer(), nullable=True),
        sa.Column("deployed_version", sa.Integer(), nullable=True),
        sa.Column("engine_id", sa.String(length=120), nullable=True),
        sa.Column("deployment", sa.String(length=12), nullable=False),
        sa.Column("deleted", sa.Boolean(), nullable=False),
        sa.Column("error", sa.JSON(none_as_null=True), nullable=True),
        sa.CheckConstraint(
            "deployment IN ('none', 'loading', 'deployed', 'unloading', 'failed')", name=op.f("ck_adapters_deployment")
        ),
        sa.PrimaryKeyConstraint("name", name="pk_adapters"),
    )
    op.create_table(
        "changes",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("topic", sa.String(length=16), nullable=False),
        sa.Column("kind", sa.String(length=40), nullable=False),
        sa.Column("ref", sa.String(length=120), nullable=True),
        sa.Column("data", sa.JSON(none_as_null=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_changes"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_changes_time", "changes", ["time"], unique=False)
    op.create_table(
        "datasets",
        sa.Column("seq", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("tokenizer", sa.String(length=1024), nullable=True),
        sa.Column("report", sa.JSON(none_as_null=True), nullable=False),
        sa.PrimaryKeyConstraint("seq", name="pk_datasets"),
        sa.UniqueConstraint("id", name="uq_datasets_id"),
        sa.UniqueConstraint("name", "version", name="uq_datasets_name_version"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "engines",
        sa.Column("id", sa.String(length=120), nullable=False),
        sa.Column("state", sa.String(length=8), nullable=False),
        sa.Column("hello", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("since", sa.DateTime(timezone=True), nullable=False),
        sa.Column("state_since", sa.DateTime(timezone=True), nullable=False),
        sa.Column("applied_version", sa.Integer(), nullable=True),
        sa.Column("notices", sa.JSON(none_as_null=True), nullable=False),
        sa.CheckConstraint("state IN ('ready', 'lost', 'gone')", name=op.f("ck_engines_state")),
        sa.PrimaryKeyConstraint("id", name="pk_engines"),
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("key", sa.String(length=255), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("job_id", sa.String(length=40), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_idempotency_keys"),
    )
    op.create_index("ix_idempotency_keys_created_at", "idempotency_keys", ["created_at"], unique=False)
    op.create_table(
        "jobs",
        sa.Column("seq", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("name", sa.String(length=120), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("spec", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("dataset_id", sa.String(length=40), nullable=False),
        sa.Column("dataset_name", sa.String(length=63), nullable=False),
        sa.Column("adapter_name", sa.String(length=63), nullable=False),
        sa.Column("adapter_version", sa.Integer(), nullable=True),
        sa.Column("initial_adapter", sa.String(length=63), nullable=True),
        sa.Column("initial_version", sa.Integer(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("state_since", sa.DateTime(timezone=True), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("total_steps", sa.Integer(), nullable=True),
        sa.Column("epoch", sa.Double(), nullable=True),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("first_loss", sa.Double(), nullable=True),
        sa.Column("eval_loss", sa.Double(), nullable=True),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("resumes", sa.Integer(), nullable=False),
        sa.Column("stalls", sa.Integer(), nullable=False),
        sa.Column("start_step", sa.Integer(), nullable=False),
        sa.Column("error", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("command", sa.String(length=8), nullable=True),
        sa.Column("command_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("engine_id", sa.String(length=120), nullable=True),
        sa.Column("token", sa.Integer(), nullable=True),
        sa.Column("checkpoint", sa.String(length=4096), nullable=True),
        sa.Column("checkpoint_step", sa.Integer(), nullable=True),
        sa.CheckConstraint("command IN ('pause', 'stop', 'save')", name=op.f("ck_jobs_command")),
        sa.CheckConstraint(
            "state IN ('queued', 'starting', 'running', 'paused', 'saving', "
            "'succeeded', 'failed', 'cancelled', 'interrupted')",
            name=op.f("ck_jobs_state"),
        ),
        sa.PrimaryKeyConstraint("seq", name="pk_jobs"),
        sa.UniqueConstraint("id", name="uq_jobs_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_jobs_adapter_name", "jobs", ["adapter_name"], unique=False)
    op.create_index("ix_jobs_dataset_id", "jobs", ["dataset_id"], unique=False)
    op.create_index("ix_jobs_state_priority_seq", "jobs", ["state", "priority", "seq"], unique=False)
    op.create_table(
        "leases",
        sa.Column("name", sa.String(length=40), nullable=False),
        sa.Column("holder", sa.String(length=120), nullable=True),
        sa.Column("token", sa.Integer(), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_leases"),
    )
    op.create_table(
        "targets",
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("targets", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("origin", sa.String(length=12), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("version", name="pk_targets"),
    )
    op.create_table(
        "telemetry",
        sa.Column("resolution_s", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("point", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("raw", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("resolution_s", "time", name="pk_telemetry"),
    )
    op.create_table(
        "adapter_versions",
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("origin", sa.String(length=12), nullable=False),
        sa.Column("job_id", sa.String(length=40), nullable=True),
        sa.Column("dataset_id", sa.String(length=40), nullable=True),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("alpha", sa.Double(), nullable=False),
        sa.Column("target_modules", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(
            ["name"], ["adapters.name"], name="fk_adapter_versions_name_adapters", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("name", "version", name="pk_adapter_versions"),
    )
    op.create_table(
        "job_events",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("job_id", sa.String(length=40), nullable=False),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("kind", sa.String(length=40), nullable=False),
        sa.Column("from_state", sa.String(length=16), nullable=True),
        sa.Column("to_state", sa.String(length=16), nullable=True),
        sa.Column("token", sa.Integer(), nullable=True),
        sa.Column("message", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_job_events_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_job_events"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_job_events_job_id_id", "job_events", ["job_id", "id"], unique=False)
    op.create_table(
        "job_logs",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("job_id", sa.String(length=40), nullable=False),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_job_logs_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_job_logs"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_job_logs_job_id_id", "job_logs", ["job_id", "id"], unique=False)
    op.create_table(
        "job_metrics",
        sa.Column("job_id", sa.String(length=40), nullable=False),
        sa.Column("step", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("eval_loss", sa.Double(), nullable=True),
        sa.Column("learning_rate", sa.Double(), nullable=True),
        sa.Column("grad_norm", sa.Double(), nullable=True),
        sa.Column("tokens", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_job_metrics_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "step", name="pk_job_metrics"),
    )


def downgrade() -> None:
    for table in (
        "job_metrics",
        "job_logs",
        "job_events",
        "adapter_versions",
        "telemetry",
        "targets",
        "leases",
        "jobs",
        "idempotency_keys",
        "engines",
        "datasets",
        "changes",
        "adapters",
    ):
        op.drop_table(table)
