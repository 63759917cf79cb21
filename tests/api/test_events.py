"""Server-sent events: what happens, in order, without gaps."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from core.api import events, schemas
from core.client import Client
from core.config import Settings
from tests.control.peer import EnginePeer
from tests.stack import until


@pytest.fixture(autouse=True)
def without_looking_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes in time was sent when it happened."""
    monkeypatch.setattr(events, "_POLL_S", 3600.0)


Listened = list[tuple[int | None, schemas.Event]]


@contextmanager
def listening(http: httpx.Client, headers: dict[str, Any] | None = None) -> Iterator[Listened]:
    """Events as they come, with their ids, while the block runs."""
    heard: Listened = []
    with http.stream("GET", "/api/events", headers=headers) as response:
        assert response.headers["content-type"].startswith("text/event-stream")

        def follow() -> None:
            event_id: int | None = None
            try:
                for line in response.iter_lines():
                    if line.startswith("id:"):
                        event_id = int(line[3:])
                    elif line.startswith("data:"):
                        heard.append((event_id, schemas.Event.model_validate_json(line[5:])))
                        event_id = None
            except httpx.HTTPError:
                pass  # the test is over

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        yield heard
        # So that reader and API both see the end at once.
        response.extensions["network_stream"].get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        thread.join(30)


def move(http: httpx.Client, times: int) -> None:
    for _ in range(times):
        version = http.get("/api/targets").json()["version"]
        body = {"version": version, "targets": [{"kind": "itl", "ms": 40 + version}]}
        assert http.put("/api/targets", json=body).status_code == 200


def versions(heard: Listened) -> list[int]:
    return [event.data["version"] for _, event in heard if event.topic == "targets" and event.kind == "set"]


def test_what_happens_is_told_at_once_to_everyone(http: httpx.Client) -> None:
    with listening(http) as one, listening(http) as other:
        move(http, 3)
        until(lambda: versions(one) == versions(other) == [1, 2, 3], what="the events")
        ids = [event_id for event_id, _ in one]
        assert ids == sorted(ids), "ids grow"
        assert all(event_id is not None for event_id in ids)


def test_one_who_comes_later_hears_what_comes_later(http: httpx.Client) -> None:
    move(http, 2)
    with listening(http) as heard:
        move(http, 1)
        until(lambda: versions(heard), what="the event")
        assert versions(heard) == [3]


def test_one_who_sees_the_stream_open_misses_nothing(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    look = events.Broadcaster._last_id

    def slowly(self: events.Broadcaster) -> int:
        time.sleep(0.3)
        return look(self)

    monkeypatch.setattr(events.Broadcaster, "_last_id", slowly)
    with listening(http) as heard:
        move(http, 1)
        until(lambda: versions(heard) == [1], what="the event")


def test_one_who_comes_back_hears_what_was_missed_once(http: httpx.Client) -> None:
    with listening(http) as heard:
        move(http, 2)
        until(lambda: len(versions(heard)) == 2, what="the events")
        last = next(event_id for event_id, event in heard if event.topic == "targets")
    move(http, 2)
    with listening(http, {"Last-Event-ID": str(last)}) as again:
        move(http, 1)
        until(lambda: len(versions(again)) >= 4, what="the events")
        assert versions(again) == [2, 3, 4, 5]


@pytest.mark.parametrize("last", ["what", "-3", "", "99999999999999999999999", "\xb2"])
def test_an_id_that_is_none_of_ours_is_as_good_as_none(http: httpx.Client, last: str) -> None:
    with listening(http, {"Last-Event-ID": last.encode("latin-1")}) as heard:
        move(http, 1)
        until(lambda: versions(heard) == [1], what="the event")


def test_the_engines_figures_come_every_second(http: httpx.Client, settings: Settings) -> None:
    engine = EnginePeer(settings.resolved_link_url)
    try:
        engine.hello()
        with listening(http) as heard:

            def told() -> bool:
                engine.telemetry(itl=[(12.0, 3)])
                return any(event.topic == "telemetry" for _, event in heard)

            until(told, what="a point", pause_s=0.3)
            _, event = next(pair for pair in heard if pair[1].topic == "telemetry")
            assert schemas.TelemetryPoint.model_validate(event.data).itl_p50_ms == 12.0
    finally:
        engine.close()


def test_the_clients_iterator_goes_on_where_it_broke_off(settings: Settings, http: httpx.Client) -> None:
    heard: list[schemas.Event] = []
    with Client(settings.api_url, token=settings.token_file) as client:

        def follow() -> None:
            for event in client.events():
                if event.topic == "targets":
                    heard.append(event)
                if len(heard) == 3:
                    return

        thread = threading.Thread(target=follow)
        thread.start()

        def first() -> bool:
            move(http, 1)
            return bool(heard)

        until(first, pause_s=0.2)
        move(http, 3)
        thread.join(30)
    assert len(heard) == 3
    assert [event.data["version"] for event in heard] == list(
        range(heard[0].data["version"], heard[0].data["version"] + 3)
    )
