"""Sends what webhooks are to be told, with retries. One receiver's deliveries go one after the other, different
receivers' beside each other, so that a slow one holds up itself alone."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from importlib.metadata import version

import httpcore
from sqlalchemy.orm import Session

from core.control import outbound
from core.control.context import Control
from db import webhooks as rows
from db.base import now
from db.webhooks import DeliveryRecord, WebhookRecord

logger = logging.getLogger(__name__)

# Pauses before the second, third … attempt; behind the last one it is given up. About a day in all.
RETRY_AFTER = tuple(timedelta(seconds=s) for s in (5, 30, 120, 600, 1800, 7200, 18_000, 36_000))
_AT_ONCE = 8
_KEEP = timedelta(days=30)

Write = Callable[[], AbstractContextManager[Session]]


class Deliverer:
    """`write` opens a write transaction that fails once the dispatch lease is lost. `run` is for one thread."""

    def __init__(self, control: Control, write: Write) -> None:
        self._control = control
        self._write = write
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="harli-webhook")
        self._busy: set[str] = set()

    def run(self) -> None:
        """Start what is due and does not wait for another delivery to the same receiver; returns at once."""
        free = _AT_ONCE - len(self._busy)
        if free <= 0:
            return
        with self._control.store.read() as session:
            due = rows.due(session, now(), tuple(self._busy), 20 * _AT_ONCE)
            first = list({delivery.webhook_id: delivery for delivery in reversed(due)}.values())[-free:]
            work = [(delivery, rows.find(session, delivery.webhook_id)) for delivery in first]
        for delivery, webhook in work:
            if webhook is not None:
                self._busy.add(webhook.id)
                self._pool.submit(self._deliver, delivery, webhook)

    def close(self) -> None:
        """Begin nothing more; what is on its way has its time-out."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _deliver(self, delivery: DeliveryRecord, webhook: WebhookRecord) -> None:
        try:
            status, error, final = self._send(delivery, webhook)
            with self._write() as session:
                record = session.get(DeliveryRecord, delivery.id)
                if record is not None:
                    _note(record, status, error, final, now())
        except Exception as fault:
            # It stays pending, and the next owner sends it: better twice than never.
            logger.warning("the delivery %d could not be noted: %s", delivery.id, fault)
        finally:
            self._busy.discard(webhook.id)

    def _send(self, delivery: DeliveryRecord, webhook: WebhookRecord) -> tuple[int | None, str | None, bool]:
        """(status, what went wrong, whether trying again is of no use)."""
        if not webhook.enabled:
            return None, "the webhook is disabled", True
        body = json.dumps(delivery.payload, separators=(",", ":")).encode()
        headers = {
            "User-Agent": f"Harli/{version('harli')}",
            **signed(webhook.secret, delivery.event_id, now(), body),
        }
        try:
            allowed = self._control.settings.webhooks_to_private_addresses
            status = outbound.post(webhook.url, body, headers, private_allowed=allowed)
        except outbound.Refused as error:
            return None, str(error), True
        except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError, OSError) as error:
            return None, f"{type(error).__name__}: {error}"[:500], False
        except Exception as error:
            return None, f"{type(error).__name__}: {error}"[:500], True
        return status, None if 200 <= status < 300 else f"the receiver answered {status}", status == 410


def _note(record: DeliveryRecord, status: int | None, error: str | None, final: bool, time: datetime) -> None:
    record.attempts += 1
    record.response_status, record.error = status, error
    if error is None:
        record.status, record.delivered_at, record.next_at = "delivered", time, None
    elif final or record.attempts > len(RETRY_AFTER):
        record.status, record.next_at = "failed", None
    else:
        record.next_at = time + RETRY_AFTER[record.attempts - 1]


def signed(secret: str, event_id: str, time: datetime, body: bytes) -> dict[str, str]:
    """The headers of the Standard Webhooks specification. The time is signed too, so that a receiver can refuse what
    someone recorded and sends again."""
    seconds = str(int(time.timestamp()))
    key = base64.b64decode(secret.removeprefix("whsec_"))
    digest = hmac.new(key, b".".join((event_id.encode(), seconds.encode(), body)), hashlib.sha256).digest()
    return {
        "webhook-id": event_id,
        "webhook-timestamp": seconds,
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }


def retain(session: Session) -> None:
    """Forget deliveries that are long over."""
    rows.drop_before(session, now() - _KEEP)
