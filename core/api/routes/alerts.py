"""Alerts and their rules."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Response

from core.api import schemas
from core.api.depends import ControlDep, Cursor, Limit, Name
from core.control import alerts

router = APIRouter(prefix="/alerts", tags=["alerts"])


@router.get("", summary="List alerts")
def page(
    control: ControlDep,
    state: Literal["pending", "firing", "resolved"] | None = None,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> schemas.Page[schemas.Alert]:
    """Newest first, of one state or all; those that ended 90 days ago are forgotten."""
    return alerts.page(control, limit, cursor, state)


@router.get("/rules", summary="List the rules")
def rules(control: ControlDep) -> list[schemas.AlertRule]:
    return alerts.rules(control)


@router.put("/rules/{name}", summary="Make or replace a rule")
def put_rule(
    control: ControlDep, name: Annotated[str, Path(pattern=schemas.NAME)], rule: schemas.AlertRuleBody
) -> schemas.AlertRule:
    """Looked at every five seconds. Webhooks that want `alert.firing` and `alert.resolved` are told."""
    return alerts.put_rule(control, name, rule)


@router.delete("/rules/{name}", status_code=204, summary="Delete a rule", response_class=Response)
def delete_rule(control: ControlDep, name: Name) -> None:
    alerts.delete_rule(control, name)
