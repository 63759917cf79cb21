"""An index for a tenant's jobs of some states: they are listed, and counted from the index alone."""

from __future__ import annotations

from alembic import op

revision = "0008_jobs_of_tenants"
down_revision = "0007_jobs_by_state"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_jobs_tenant_state_seq", "jobs", ["tenant", "state", "seq"], unique=False)


def downgrade() -> None:
    op.drop_index("ix_jobs_tenant_state_seq", "jobs")
