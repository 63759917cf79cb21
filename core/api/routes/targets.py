"""Latency targets."""

from __future__ import annotations

from fastapi import APIRouter

from core.api import schemas
from core.api.depends import ControlDep
from core.control import targets

router = APIRouter(prefix="/targets", tags=["targets"])


@router.get("", summary="The targets in force")
def get(control: ControlDep) -> schemas.Targets:
    """`applied_version` is the version that the engine plans with."""
    with control.store.read() as session:
        return targets.view(session)


@router.put("", summary="Set the targets")
def put(control: ControlDep, update: schemas.TargetsUpdate) -> schemas.Targets:
    """In force in the engine within two seconds. 409, with the targets in force, when they are no longer the version
    that was read."""
    return targets.put(control, update)
