"""Webhooks: signed, tried again, never in anyone's way, and to no address inside the platform's network."""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from core.api import schemas
from core.api.job_schemas import Delivery, WebhookCreate, WebhookPatch
from core.control import deliverer, jobs, outbound, webhooks
from core.control.context import Control
from core.control.deliverer import Deliverer
from core.errors import HarliError, Invalid, NotFound
from db.webhooks import DeliveryRecord
from tests.stack import until

Submit = Callable[..., schemas.Job]


class Receiver:
    """A customer's server: it keeps what came, and answers `status` once it is `ready`."""

    def __init__(self) -> None:
        self.status, self.ready = 200, threading.Event()
        self.ready.set()
        self.came: list[tuple[dict[str, str], bytes]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.came.append(({name.lower(): value for name, value in self.headers.items()}, body))
                outer.ready.wait()
                self.send_response(outer.status)
                self.send_header("Location", "http://127.0.0.1:1/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/hook"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
def sender(control: Control) -> Iterator[Deliverer]:
    control.settings.webhooks_to_private_addresses = True
    made = Deliverer(control, control.store.write)
    yield made
    until(lambda: not made._busy, 60, "the deliveries")
    made.close()


def told(control: Control, sender: Deliverer, webhook_id: str) -> list[Delivery]:
    """After everything that is due was tried once."""
    sender.run()
    until(lambda: not sender._busy, 60, "the deliveries")
    return list(reversed(webhooks.deliveries(control, webhook_id, 100, None).items))


def hook(control: Control, url: str, **fields: Any) -> Any:
    return webhooks.create(control, WebhookCreate.model_validate({"url": url, **fields}))


# ---- sending ---------------------------------------------------------------------------------------------------------


def test_an_event_comes_signed_as_the_specification_says(
    control: Control, submit: Submit, receiver: Receiver, sender: Deliverer
) -> None:
    made = hook(control, receiver.url, events=["job.submitted"])
    job = submit()
    jobs.stop(control, job.id, save=False)  # not asked for
    (delivery,) = told(control, sender, made.id)
    assert (delivery.status, delivery.attempts, delivery.response_status) == ("delivered", 1, 200)
    ((headers, body),) = receiver.came
    payload = json.loads(body)
    assert (payload["type"], payload["data"]["job"]["id"]) == ("job.submitted", job.id)
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    key = base64.b64decode(made.secret.removeprefix("whsec_"))
    expected = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{expected}"
    assert abs(int(headers["webhook-timestamp"]) - time.time()) < 20
    assert headers["webhook-id"] == delivery.event_id


def test_a_transition_that_is_rolled_back_tells_nobody(control: Control, submit: Submit, receiver: Receiver) -> None:
    control.settings.webhooks_to_private_addresses = True
    made = hook(control, receiver.url)
    job = submit("one")
    with pytest.raises(HarliError):
        submit("one")
    events = [delivery.event for delivery in webhooks.deliveries(control, made.id, 10, None).items]
    assert events == ["job.submitted"]
    jobs.pause(control, job.id)
    events = [delivery.event for delivery in webhooks.deliveries(control, made.id, 10, None).items]
    assert events == ["job.paused", "job.submitted"]


def test_what_fails_is_tried_again_with_growing_pauses_and_then_given_up(
    control: Control, submit: Submit, receiver: Receiver, sender: Deliverer
) -> None:
    made = hook(control, receiver.url)
    submit()
    receiver.status = 500
    pauses = []
    for attempt in range(1, len(deliverer.PAUSES) + 1):
        (delivery,) = told(control, sender, made.id)
        assert delivery.attempts == attempt
        if delivery.next_at is not None:
            pauses.append((delivery.next_at - datetime.now(UTC)).total_seconds())
            (delivery,) = told(control, sender, made.id)
            assert delivery.attempts == attempt, "not before its time"
            with control.store.write() as session:
                session.get_one(DeliveryRecord, delivery.id).next_at = datetime.now(UTC)
    assert delivery.status == "failed" and "answered 500" in (delivery.error or "")
    assert pauses == sorted(pauses) and timedelta(seconds=sum(pauses)) > timedelta(hours=12)
    receiver.status = 204
    webhooks.retry(control, made.id, delivery.id)
    assert told(control, sender, made.id)[0].status == "delivered"


@pytest.mark.parametrize("attempts", [0, 1, 8])
def test_what_waits_when_the_clock_is_set_back_is_not_late_for_that(
    control: Control, submit: Submit, receiver: Receiver, sender: Deliverer, attempts: int
) -> None:
    made = hook(control, receiver.url)
    submit()
    receiver.status = 500
    for _ in range(attempts):
        with control.store.write() as session:
            for delivery in webhooks.deliveries(control, made.id, 10, None).items:
                session.get_one(DeliveryRecord, delivery.id).next_at = datetime.now(UTC)
        told(control, sender, made.id)
    receiver.status = 204
    with control.store.write() as session:
        (delivery,) = webhooks.deliveries(control, made.id, 10, None).items
        record = session.get_one(DeliveryRecord, delivery.id)
        assert record.attempts == attempts and record.next_at is not None
        record.next_at += timedelta(hours=1)
    assert told(control, sender, made.id)[0].status == "delivered"


def test_a_receiver_that_is_gone_for_good_is_not_asked_again(
    control: Control, submit: Submit, receiver: Receiver, sender: Deliverer
) -> None:
    made = hook(control, receiver.url)
    receiver.status = 410
    submit()
    assert told(control, sender, made.id)[0].status == "failed"


def test_a_slow_receiver_holds_up_itself_alone(
    control: Control, submit: Submit, receiver: Receiver, sender: Deliverer
) -> None:
    slow = Receiver()
    slow.ready.clear()
    hook(control, slow.url)
    quick = hook(control, receiver.url)
    for name in "abc":
        submit(name)

    def all_delivered() -> bool:
        sender.run()
        return [d.status for d in webhooks.deliveries(control, quick.id, 10, None).items] == ["delivered"] * 3

    until(all_delivered, what="the quick receiver's deliveries")
    assert len(receiver.came) == 3 and len(slow.came) < 3
    slow.ready.set()
    slow.close()


def test_a_redirect_is_not_followed(control: Control, submit: Submit, receiver: Receiver, sender: Deliverer) -> None:
    made = hook(control, receiver.url)
    receiver.status = 302
    submit()
    assert "answered 302" in (told(control, sender, made.id)[0].error or "")
    assert len(receiver.came) == 1


def test_one_job_and_one_tenant_are_told_apart(control: Control, submit: Submit, receiver: Receiver) -> None:
    control.settings.webhooks_to_private_addresses = True
    first = submit("first")
    made = hook(control, receiver.url, job_id=first.id)
    submit("second")
    jobs.pause(control, first.id)
    assert [d.event for d in webhooks.deliveries(control, made.id, 10, None).items] == ["job.paused"]
    with pytest.raises(NotFound):
        hook(control, receiver.url, job_id="job-nowhere")


def test_a_disabled_or_deleted_webhook_is_told_nothing(
    control: Control, submit: Submit, receiver: Receiver, sender: Deliverer
) -> None:
    made = hook(control, receiver.url)
    submit("a")
    webhooks.update(control, made.id, WebhookPatch(enabled=False))
    submit("b")
    assert [d.status for d in told(control, sender, made.id)] == ["failed"]
    webhooks.delete(control, made.id)
    assert webhooks.page(control, 10, None).items == [] and receiver.came == []


# ---- where to --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/hook", "https://127.0.0.1/", "https://[::1]/", "https://169.254.169.254/latest/meta-data",
        "https://10.1.2.3/", "https://192.168.0.1/", "https://100.64.0.1/", "https://[::ffff:10.0.0.1]/",
        "https://[fd00::1]/", "https://0.0.0.0/", "https://user:secret@example.com/",
    ],
)  # fmt: skip
def test_an_address_inside_the_network_or_in_the_clear_is_refused(control: Control, url: str) -> None:
    with pytest.raises(Invalid) as caught:
        hook(control, url)
    assert caught.value.param == "url" and "secret@" not in caught.value.message


@pytest.mark.parametrize("inside", ["127.0.0.1", "10.0.0.8", "169.254.169.254", "::1", "fe80::1%eth0", "2002:7f00:1::"])
def test_a_name_that_leads_inside_is_refused_when_it_is_sent_to(inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = socket.AF_INET6 if ":" in inside else socket.AF_INET
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.215.14", 443)),
              (family, socket.SOCK_STREAM, 6, "", (inside, 443))]  # fmt: skip
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    with pytest.raises(outbound.Refused, match="inside the platform's network"):
        outbound.post("https://rebound.example/", b"{}", {}, private_allowed=False)


def test_the_connection_goes_to_the_address_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    real = outbound.httpcore.SyncBackend.connect_tcp

    def connect(self: Any, host: str, *args: Any, **kwargs: Any) -> Any:
        asked.append(host)
        raise outbound.httpcore.ConnectError("far away")

    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", ("93.184.215.14", 443))])
    monkeypatch.setattr(outbound.httpcore.SyncBackend, "connect_tcp", connect)
    with pytest.raises(outbound.httpcore.ConnectError):
        outbound.post("https://somewhere.example/", b"{}", {}, private_allowed=False)
    assert asked == ["93.184.215.14"] and real is not connect


def test_a_receiver_that_drips_is_left_when_its_time_is_over() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def drip() -> None:
        connection, _ = listener.accept()
        with connection:
            try:
                for byte in b"HTTP/1.1 200 OK" * 100:
                    connection.sendall(bytes([byte]))
                    time.sleep(0.05)
            except OSError:
                """The other side has left."""

    thread = threading.Thread(target=drip)
    thread.start()
    begin = time.monotonic()
    with pytest.raises(outbound.httpcore.ReadTimeout):
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        outbound.post(url, b"{}", {}, private_allowed=True, timeout_s=0.4)
    assert time.monotonic() - begin < 20, "it drips for more than a minute"
    thread.join(60)
    listener.close()


def test_public_addresses_are_public() -> None:
    assert all(outbound._is_public(ipaddress.ip_address(text)) for text in ("93.184.215.14", "2606:2800:21f::1"))


def test_the_secret_is_told_once_and_never_logged(control: Control, receiver: Receiver) -> None:
    control.settings.webhooks_to_private_addresses = True
    made = hook(control, receiver.url)
    assert made.secret.startswith("whsec_")
    assert "secret" not in webhooks.get(control, made.id).model_dump()
