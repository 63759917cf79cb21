"""Every model, so that the metadata is whole."""

from __future__ import annotations

from db import adapters, changes, datasets, engines, idempotency, jobs, leases, targets, telemetry
from db.base import Base

__all__ = ["adapters", "changes", "datasets", "engines", "idempotency", "jobs", "leases", "targets", "telemetry"]
metadata = Base.metadata
