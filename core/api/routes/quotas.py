"""Quotas of tenants."""

from __future__ import annotations

from fastapi import APIRouter

from core.api.depends import ControlDep, Name
from core.api.job_schemas import Quota, QuotaUpdate
from core.control import quotas

router = APIRouter(prefix="/quotas", tags=["tenants"])


@router.get("/{tenant}", summary="A tenant's limits, and what it uses of them")
def get(control: ControlDep, tenant: Name) -> Quota:
    return quotas.get(control, tenant)


@router.put("/{tenant}", summary="Set a tenant's limits")
def put(control: ControlDep, tenant: Name, body: QuotaUpdate) -> Quota:
    """All of them; what is left out has no limit. For the platform's admins."""
    return quotas.put(control, tenant, body)
