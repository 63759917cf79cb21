"""Every model, so that the metadata is whole."""

from __future__ import annotations

from db import (
    adapters,
    alerts,
    audit,
    changes,
    datasets,
    engines,
    idempotency,
    jobs,
    leases,
    notices,
    openai,
    operations,
    quotas,
    samples,
    schedules,
    targets,
    telemetry,
    tenants,
    webhooks,
)
from db.base import Base

__all__ = [
    "adapters",
    "alerts",
    "audit",
    "changes",
    "datasets",
    "engines",
    "idempotency",
    "jobs",
    "leases",
    "notices",
    "openai",
    "operations",
    "quotas",
    "samples",
    "schedules",
    "targets",
    "telemetry",
    "tenants",
    "webhooks",
]
metadata = Base.metadata
