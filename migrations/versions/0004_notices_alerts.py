"""Notices in a table of their own, which keeps more than an engine's last twenty; what an engine has learnt of itself;
alerts and their first rules."""

from __future__ import annotations

from datetime import UTC, datetime

import sqlalchemy as sa
from alembic import op

revision = "0004_notices_alerts"
down_revision = "0003_jobs"
branch_labels = None
depends_on = None

_FIRST_RULES = [
    ("engine-down", "engine_ready", "below", 1.0, 60.0, 30.0, "critical"),
    ("attainment", "attainment", "below", 0.99, 300.0, 120.0, "warning"),
    ("waiting-jobs", "longest_wait_s", "above", 3600.0, 60.0, 60.0, "warning"),
]


def upgrade() -> None:
    op.create_table(
        "notices",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("engine_id", sa.String(length=120), nullable=False),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("level", sa.String(length=8), nullable=False),
        sa.Column("code", sa.String(length=40), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_notices"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_notices_engine_id", "notices", ["engine_id"], unique=False)
    op.create_index("ix_notices_time", "notices", ["time"], unique=False)
    with op.batch_alter_table("engines") as engines:
        engines.drop_column("notices")
        engines.add_column(sa.Column("learnt", sa.JSON(none_as_null=True), nullable=True))
    rules = op.create_table(
        "alert_rules",
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("metric", sa.String(length=40), nullable=False),
        sa.Column("comparison", sa.String(length=8), nullable=False),
        sa.Column("threshold", sa.Double(), nullable=False),
        sa.Column("window_s", sa.Double(), nullable=False),
        sa.Column("for_s", sa.Double(), nullable=False),
        sa.Column("severity", sa.String(length=8), nullable=False),
        sa.Column("enabled", sa.Boolean(), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_alert_rules"),
    )
    op.create_table(
        "alerts",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("rule", sa.String(length=63), nullable=False),
        sa.Column("severity", sa.String(length=8), nullable=False),
        sa.Column("state", sa.String(length=8), nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("began_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("fired_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("resolved_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("state IN ('pending', 'firing', 'resolved')", name=op.f("ck_alerts_state")),
        sa.PrimaryKeyConstraint("id", name="pk_alerts"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_alerts_state", "alerts", ["state"], unique=False)
    names = ("name", "metric", "comparison", "threshold", "window_s", "for_s", "severity")
    time = datetime.now(UTC)
    op.bulk_insert(
        rules,
        [dict(zip(names, rule, strict=True)) | {"enabled": True, "updated_at": time} for rule in _FIRST_RULES],
    )


def downgrade() -> None:
    for table in ("alerts", "alert_rules", "notices"):
        op.drop_table(table)
    with op.batch_alter_table("engines") as engines:
        engines.drop_column("learnt")
        engines.add_column(sa.Column("notices", sa.JSON(none_as_null=True), nullable=False, server_default="[]"))
