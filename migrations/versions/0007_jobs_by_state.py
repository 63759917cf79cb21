"""An index for listing the jobs of one state, newest first."""

from __future__ import annotations

from alembic import op

revision = "0007_jobs_by_state"
down_revision = "0006_fine_tuning_requests"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_jobs_state_seq", "jobs", ["state", "seq"], unique=False)


def downgrade() -> None:
    op.drop_index("ix_jobs_state_seq", "jobs")
