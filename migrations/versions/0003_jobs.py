"""Jobs: places in the queue, deadlines, the best evaluation, samples; schedules; webhooks; quotas."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003_jobs"
down_revision = "0002_tenants"
branch_labels = None
depends_on = None


def _job_columns() -> tuple[sa.Column, ...]:
    return (
        sa.Column("place", sa.Double(), nullable=True),
        sa.Column("deadline", sa.DateTime(timezone=True), nullable=True),
        sa.Column("deadline_warned", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("schedule_id", sa.String(length=40), nullable=True),
        sa.Column("expected_tokens", sa.BigInteger(), nullable=True),
        sa.Column("counted_tokens", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("held", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("best_step", sa.Integer(), nullable=True),
        sa.Column("best_loss", sa.Double(), nullable=True),
        sa.Column("sample_step", sa.Integer(), nullable=True),
        sa.Column("sample_path", sa.String(length=4096), nullable=True),
    )


def upgrade() -> None:
    for column in _job_columns():
        op.add_column("jobs", column)
    op.create_index("ix_jobs_schedule_id", "jobs", ["schedule_id"], unique=False)
    op.create_table(
        "job_samples",
        sa.Column("job_id", sa.String(length=40), nullable=False),
        sa.Column("step", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("prompt", sa.Text(), nullable=False),
        sa.Column("answer", sa.Text(), nullable=False),
        sa.Column("tokens", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_job_samples_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "step", "number", name="pk_job_samples"),
    )
    op.create_table(
        "quotas",
        sa.Column("tenant", sa.String(length=63), nullable=False),
        sa.Column("finetune_tokens_day", sa.BigInteger(), nullable=True),
        sa.Column("running_jobs", sa.Integer(), nullable=True),
        sa.Column("waiting_jobs", sa.Integer(), nullable=True),
        sa.PrimaryKeyConstraint("tenant", name="pk_quotas"),
    )
    op.create_table(
        "finetune_usage",
        sa.Column("tenant", sa.String(length=63), nullable=False),
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "day", name="pk_finetune_usage"),
    )
    op.create_table(
        "schedules",
        sa.Column("seq", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant", sa.String(length=63), nullable=False),
        sa.Column("name", sa.String(length=120), nullable=False),
        sa.Column("cron", sa.String(length=120), nullable=False),
        sa.Column("timezone", sa.String(length=64), nullable=False),
        sa.Column("spec", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("continued", sa.Boolean(), nullable=False),
        sa.Column("only_new_data", sa.Boolean(), nullable=False),
        sa.Column("enabled", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("next_run_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_run_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_job_id", sa.String(length=40), nullable=True),
        sa.Column("last_dataset_id", sa.String(length=40), nullable=True),
        sa.Column("last_message", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("seq", name="pk_schedules"),
        sa.UniqueConstraint("id", name="uq_schedules_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_schedules_next_run_at", "schedules", ["next_run_at"], unique=False)
    op.create_table(
        "webhooks",
        sa.Column("seq", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant", sa.String(length=63), nullable=False),
        sa.Column("url", sa.String(length=2048), nullable=False),
        sa.Column("secret", sa.String(length=120), nullable=False),
        sa.Column("events", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("job_id", sa.String(length=40), nullable=True),
        sa.Column("enabled", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("seq", name="pk_webhooks"),
        sa.UniqueConstraint("id", name="uq_webhooks_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_webhooks_job_id", "webhooks", ["job_id"], unique=False)
    op.create_table(
        "webhook_deliveries",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("webhook_id", sa.String(length=40), nullable=False),
        sa.Column("event_id", sa.String(length=40), nullable=False),
        sa.Column("event", sa.String(length=40), nullable=False),
        sa.Column("payload", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("status", sa.String(length=12), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("next_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("delivered_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("response_status", sa.Integer(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.CheckConstraint("status IN ('pending', 'delivered', 'failed')", name=op.f("ck_webhook_deliveries_status")),
        sa.ForeignKeyConstraint(
            ["webhook_id"], ["webhooks.id"], name="fk_webhook_deliveries_webhook_id_webhooks", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_webhook_deliveries"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_webhook_deliveries_status_next_at", "webhook_deliveries", ["status", "next_at"], unique=False)
    op.create_index("ix_webhook_deliveries_webhook_id_id", "webhook_deliveries", ["webhook_id", "id"], unique=False)


def downgrade() -> None:
    for table in ("webhook_deliveries", "webhooks", "schedules", "finetune_usage", "quotas", "job_samples"):
        op.drop_table(table)
    op.drop_index("ix_jobs_schedule_id", "jobs")
    for column in _job_columns():
        op.drop_column("jobs", column.name)
