"""The highest priority that a tenant's jobs may be given."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009_priority_ceilings"
down_revision = "0008_jobs_of_tenants"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("quotas", sa.Column("max_priority", sa.Integer(), nullable=True))


def downgrade() -> None:
    op.drop_column("quotas", "max_priority")
