"""Sends what webhooks are to be told, with retries. One receiver's deliveries go one after the other, different
receivers' beside each other, so that a slow one holds up itself alone."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import time
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

# Pauses before the first, second … attempt; behind the last one it is given up. About a day in all.
PAUSES = tuple(timedelta(seconds=s) for s in (0, 5, 30, 120, 600, 1800, 7200, 18_000, 36_000))
_AT_ONCE = 8
_TURN_S = 5.0
_LOOKED_AT = 1000
_KEEP = timedelta(days=30)

Write = Callable[[], AbstractContextManager[Session]]


class Deliverer:
    """`write` opens a write transaction that fails once the dispatch lease is lost. `run` is for one thread."""

    def __init__(self, control: Control, write: Write) -> None:
        self._control = control
        self._write = write
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="harli-webhook")
        self._busy: set[str] = set()
        self._served: dict[str, float] = {}

    def run(self) -> None:
        """Start on every receiver that something is due to and that is not being served; returns at once."""
        with self._control.store.read() as session:
            waiting = rows.due(session, now(), PAUSES, _LOOKED_AT)
        # Whose turn was longest ago comes first, so that slow ones cannot take every place for ever.
        self._served = {webhook.id: self._served.get(webhook.id, 0.0) for webhook in waiting}
        for webhook in sorted(waiting, key=lambda webhook: self._served[webhook.id]):
            if webhook.id not in self._busy and len(self._busy) < _AT_ONCE:
                self._busy.add(webhook.id)
                self._served[webhook.id] = time.monotonic()
                self._pool.submit(self._serve, webhook)

    def close(self) -> None:
        """Begin nothing more; what is on its way has its time-out."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _serve(self, webhook: WebhookRecord) -> None:
        """Send what is due to a receiver, in order, until something fails or its turn is over."""
        until = time.monotonic() + _TURN_S
        try:
            while time.monotonic() < until:
                with self._control.store.read() as session:
                    delivery = rows.next_due(session, webhook.id, now(), PAUSES)
                if delivery is None or not self._deliver(delivery, webhook):
                    return
        except Exception as fault:
            # What could not be noted stays pending, and is sent again: better twice than never.
            logger.warning("a delivery to webhook %s could not be noted: %s", webhook.id, fault)
        finally:
            self._busy.discard(webhook.id)

    def _deliver(self, delivery: DeliveryRecord, webhook: WebhookRecord) -> bool:
        """Try once and note how it went; whether it arrived."""
        status, error, final = self._send(delivery, webhook)
        with self._write() as session:
            record = session.get(DeliveryRecord, delivery.id)
            if record is not None:
                _note(record, status, error, final, now())
        return error is None

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


def _note(record: DeliveryRecord, status: int | None, error: str | None, final: bool, moment: datetime) -> None:
    record.attempts += 1
    record.response_status, record.error = status, error
    if error is None:
        record.status, record.delivered_at, record.next_at = "delivered", moment, None
    elif final or record.attempts >= len(PAUSES):
        record.status, record.next_at = "failed", None
    else:
        record.next_at = moment + PAUSES[record.attempts]


def signed(secret: str, event_id: str, moment: datetime, body: bytes) -> dict[str, str]:
    """The headers of the Standard Webhooks specification. The time is signed too, so that a receiver can refuse what
    someone recorded and sends again."""
    seconds = str(int(moment.timestamp()))
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
