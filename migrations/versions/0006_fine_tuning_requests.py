"""Requests for fine-tuning jobs in OpenAI's terms."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006_fine_tuning_requests"
down_revision = "0005_intake"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "fine_tuning_requests",
        sa.Column("job_id", sa.String(length=40), nullable=False),
        sa.Column("request", sa.JSON(none_as_null=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name="fk_fine_tuning_requests_job_id_jobs", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", name="pk_fine_tuning_requests"),
    )


def downgrade() -> None:
    op.drop_table("fine_tuning_requests")
