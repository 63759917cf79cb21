"""Webhooks: who is told of what happens to jobs. An event is written down in the transaction in which it happens; the
`deliverer` sends it afterwards, so that no receiver can hold anything up and none misses what was committed."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping
from typing import Any

from sqlalchemy.orm import Session

from core.api.job_schemas import (
    Delivery,
    Webhook,
    WebhookCreate,
    WebhookPatch,
    WebhookWithSecret,
)
from core.api.schemas import Page
from core.control import outbound, pages
from core.control.context import Control, new_id
from core.errors import Conflict, NotFound
from db import jobs as job_rows
from db import webhooks as rows
from db.base import now
from db.jobs import JobRecord
from db.webhooks import DeliveryRecord, WebhookRecord

# Events of a job, by the kind of transition or remark.
EVENTS: Mapping[str, str] = {
    kind: f"job.{kind}"
    for kind in (
        "submitted", "running", "paused", "interrupted", "stopped_early", "deadline_at_risk", "succeeded", "failed",
        "cancelled",
    )
}  # fmt: skip
_MOST = 100


def tell(session: Session, job: JobRecord, kind: str, message: str) -> None:
    """Write down what happened to a job for those who want to know; nothing for kinds that are no events."""
    event = EVENTS.get(kind)
    wanting = rows.wanting(session, job.tenant, event, job.id) if event is not None else []
    if not wanting or event is None:
        return
    shown = (
        "id", "name", "state", "tenant", "dataset_id", "dataset_name", "adapter_name", "adapter_version", "step",
        "total_steps", "loss", "eval_loss", "tokens", "error",
    )  # fmt: skip
    data = {"job": {name: getattr(job, name) for name in shown}, "message": message}
    for webhook in wanting:
        _put(session, webhook, event, data)


def announce(session: Session, tenant: str, event: str, data: dict[str, Any]) -> None:
    """Write down an event of a tenant's that is no job's, for those who want to know."""
    for webhook in rows.wanting(session, tenant, event, None):
        _put(session, webhook, event, data)


def _put(session: Session, webhook: WebhookRecord, event: str, data: dict[str, Any]) -> DeliveryRecord:
    time = now()
    record = DeliveryRecord(
        webhook_id=webhook.id,
        event_id=new_id("evt"),
        event=event,
        payload={"type": event, "timestamp": time.isoformat(), "data": data},
        created_at=time,
        next_at=time,
        status="pending",
        attempts=0,
    )
    session.add(record)
    return record


# ---- managing --------------------------------------------------------------------------------------------------------


def create(control: Control, body: WebhookCreate) -> WebhookWithSecret:
    """Raises Invalid for an address that may not be sent to, NotFound for a job that there is not."""
    url = str(body.url)
    outbound.check_url(url, control.settings.webhooks_to_private_addresses)
    with control.store.write() as session:
        if body.job_id is not None and job_rows.find(session, body.job_id) is None:
            raise NotFound("job_not_found", f"there is no job {body.job_id}; `harli jobs` lists them", "job_id")
        tenant = control.principal.tenant
        if rows.count(session, tenant) >= _MOST:
            raise Conflict("too_many_webhooks", f"tenant {tenant} has {_MOST} webhooks; delete one that is not needed")
        record = WebhookRecord(
            id=new_id("wh"),
            tenant=tenant,
            url=url,
            secret="whsec_" + base64.b64encode(secrets.token_bytes(32)).decode(),
            events=list(body.events),
            job_id=body.job_id,
            enabled=True,
            created_at=now(),
        )
        session.add(record)
        session.flush()
        return WebhookWithSecret.model_validate(record, from_attributes=True)


def page(control: Control, limit: int, cursor: str | None) -> Page[Webhook]:
    before = pages.key(cursor, int)
    with control.store.read() as session:
        found = rows.page(session, limit + 1, before)
        following = pages.cursor(found[limit - 1].seq) if len(found) > limit else None
        items = [Webhook.model_validate(record, from_attributes=True) for record in found[:limit]]
        return Page(items=items, next=following)


def get(control: Control, webhook_id: str) -> Webhook:
    with control.store.read() as session:
        return Webhook.model_validate(_require(session, webhook_id), from_attributes=True)


def update(control: Control, webhook_id: str, patch: WebhookPatch) -> Webhook:
    with control.store.write() as session:
        record = _require(session, webhook_id)
        if patch.events is not None:
            record.events = list(patch.events)
        if patch.enabled is not None:
            record.enabled = patch.enabled
        return Webhook.model_validate(record, from_attributes=True)


def delete(control: Control, webhook_id: str) -> None:
    """Take it away, with what is still on its way to it."""
    with control.store.write() as session:
        session.delete(_require(session, webhook_id))


def test(control: Control, webhook_id: str) -> Delivery:
    """Send it an event of the kind ``webhook.test``."""
    with control.store.write() as session:
        record = _put(session, _require(session, webhook_id), "webhook.test", {"message": "a test, asked for by hand"})
        session.flush()
        return Delivery.model_validate(record, from_attributes=True)


def deliveries(control: Control, webhook_id: str, limit: int, cursor: str | None) -> Page[Delivery]:
    before = pages.key(cursor, int)
    with control.store.read() as session:
        _require(session, webhook_id)
        found = rows.deliveries(session, webhook_id, limit + 1, before)
        following = pages.cursor(found[limit - 1].id) if len(found) > limit else None
        items = [Delivery.model_validate(record, from_attributes=True) for record in found[:limit]]
        return Page(items=items, next=following)


def retry(control: Control, webhook_id: str, delivery_id: int) -> Delivery:
    """Send one again that was given up on."""
    with control.store.write() as session:
        _require(session, webhook_id)
        record = session.get(DeliveryRecord, delivery_id)
        if record is None or record.webhook_id != webhook_id:
            raise NotFound("delivery_not_found", f"webhook {webhook_id} has no delivery {delivery_id}", "delivery_id")
        record.status, record.next_at, record.attempts = "pending", now(), 0
        return Delivery.model_validate(record, from_attributes=True)


def _require(session: Session, webhook_id: str) -> WebhookRecord:
    record = rows.find(session, webhook_id)
    if record is None:
        raise NotFound(
            "webhook_not_found", f"there is no webhook {webhook_id}; `harli webhooks` lists them", "webhook_id"
        )
    return record
