"""Pages of other origins may not change anything, nor read by a name that was rebound."""

from __future__ import annotations

import httpx
import pytest

from core.config import Settings

TARGETS = {"version": 0, "targets": [{"kind": "itl", "ms": 40}]}


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://127.0.0.1:1", "https://localhost.evil.example"]
)
def test_a_foreign_page_may_not_change_anything(http: httpx.Client, origin: str) -> None:
    response = http.put("/api/targets", json=TARGETS, headers={"Origin": origin})
    assert response.status_code == 403
    assert origin in response.json()["error"]["message"]
    assert http.get("/api/targets").json()["version"] == 0


def test_the_console_and_programs_may(http: httpx.Client, settings: Settings) -> None:
    console = http.put("/api/targets", json=TARGETS, headers={"Origin": f"http://localhost:{settings.console_port}"})
    assert console.status_code == 200
    assert console.headers["access-control-allow-origin"] == f"http://localhost:{settings.console_port}"
    assert http.put("/api/targets", json=TARGETS | {"version": 1}).status_code == 200


def test_a_foreign_page_gets_no_leave_to_read(http: httpx.Client) -> None:
    response = http.get("/api/targets", headers={"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in response.headers
    preflight = {"Origin": "https://evil.example", "Access-Control-Request-Method": "PUT"}
    assert "access-control-allow-origin" not in http.options("/api/targets", headers=preflight).headers


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8600", "127.0.0.1.evil.example"])
def test_a_name_that_was_rebound_to_this_machine_is_refused(http: httpx.Client, host: str) -> None:
    response = http.get("/api/engine", headers={"Host": host})
    assert response.status_code == 403
    assert "HARLI_HOST" in response.json()["error"]["message"]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1234", "[::1]:80", "127.0.0.1"])
def test_this_machines_names_are_taken(http: httpx.Client, host: str) -> None:
    assert http.get("/api/engine", headers={"Host": host}).status_code == 200
