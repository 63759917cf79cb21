"""Webhooks."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Response

from core.api.depends import ControlDep, Cursor, Limit, Name
from core.api.job_schemas import Delivery, Webhook, WebhookCreate, WebhookPatch, WebhookWithSecret
from core.api.schemas import Page
from core.control import webhooks

router = APIRouter(prefix="/webhooks", tags=["webhooks"])


@router.post("", status_code=201, summary="Be told of what happens to jobs")
def create(control: ControlDep, body: WebhookCreate) -> WebhookWithSecret:
    """Events are sent by POST and signed; the secret is answered this once. An address that does not answer 2xx within
    ten seconds is tried again with growing pauses, for about a day."""
    return webhooks.create(control, body)


@router.get("", summary="List webhooks")
def page(control: ControlDep, limit: Limit = 100, cursor: Cursor = None) -> Page[Webhook]:
    """Newest first."""
    return webhooks.page(control, limit, cursor)


@router.get("/{webhook_id}", summary="Look at a webhook")
def get(control: ControlDep, webhook_id: Name) -> Webhook:
    return webhooks.get(control, webhook_id)


@router.patch("/{webhook_id}", summary="Change a webhook's events, or switch it off and on")
def patch(control: ControlDep, webhook_id: Name, body: WebhookPatch) -> Webhook:
    return webhooks.update(control, webhook_id, body)


@router.delete("/{webhook_id}", status_code=204, summary="Delete a webhook", response_class=Response)
def delete(control: ControlDep, webhook_id: Name) -> None:
    webhooks.delete(control, webhook_id)


@router.post("/{webhook_id}/test", status_code=202, summary="Send a test event")
def test(control: ControlDep, webhook_id: Name) -> Delivery:
    return webhooks.test(control, webhook_id)


@router.get("/{webhook_id}/deliveries", summary="What was sent to a webhook")
def deliveries(control: ControlDep, webhook_id: Name, limit: Limit = 100, cursor: Cursor = None) -> Page[Delivery]:
    """Newest first, with the last attempt's outcome. A month is kept."""
    return webhooks.deliveries(control, webhook_id, limit, cursor)


@router.post("/{webhook_id}/deliveries/{delivery_id}/retry", status_code=202, summary="Send an event again")
def retry(control: ControlDep, webhook_id: Name, delivery_id: Annotated[int, Path(ge=1, lt=2**63)]) -> Delivery:
    return webhooks.retry(control, webhook_id, delivery_id)
