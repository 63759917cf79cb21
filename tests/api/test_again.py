"""What was answered a moment ago is answered again without the gate, to those whom the gate would let through."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from core.api import answers
from core.api.answers import Answers, Key
from core.api.gate import Gate
from core.control import tokens
from tests.api.inside import Inside, as_one, inside, made
from tests.api.serving import plain, served


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    with inside(tmp_path_factory.mktemp("again")) as found:
        yield found


@pytest.fixture(autouse=True)
def for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers and tokens are known for longer than a test takes."""
    monkeypatch.setattr(answers, "_KEPT_S", 600.0)
    monkeypatch.setattr(tokens, "_KNOWN_S", 600.0)


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that came to the gate."""
    found: list[str] = []
    gate = Gate.__call__

    async def noting(self: Gate, scope: Scope, receive: Receive, send: Send) -> None:
        found.append(scope.get("path", ""))
        await gate(self, scope, receive, send)

    monkeypatch.setattr(Gate, "__call__", noting)
    return found


@pytest.mark.parametrize("path", ["/api/jobs?limit=7", "/api/live?window_s=7", "/api/telemetry?seconds=7"])
def test_the_same_comes_again_without_the_gate(place: Inside, passed: list[str], path: str) -> None:
    with place.someone("a", f"new-{len(path)}", "viewer") as unknown:
        passed.clear()
        first, again = unknown.get(path), unknown.get(path)
    assert passed == [path.partition("?")[0]]
    assert (first.status_code, first.content) == (again.status_code, again.content)
    assert {**first.headers, "date": ""} == {**again.headers, "date": ""}


@pytest.mark.parametrize("path", ["/api/jobs?limit=3&state=queued", "/api/jobs?cursor=MTA", "/api/telemetry?points=6"])
def test_it_is_made_without_the_gate_too_as_the_route_makes_it(place: Inside, passed: list[str], path: str) -> None:
    place.ann.get("/api/datasets")
    passed.clear()
    made_here = place.ann.get(path)
    assert passed == []
    by_route = place.ann.get(f"{path}&more=x", headers={"Origin": f"http://127.0.0.1:{place.settings.console_port}"})
    assert passed == [path.partition("?")[0]]
    assert (made_here.status_code, made_here.content) == (by_route.status_code, by_route.content)


@pytest.mark.parametrize("query", ["limit=0", "limit=", "state=dancing", "cursor=%FF", "limit=5&limit=x"])
def test_what_is_wrong_with_a_query_the_route_says(place: Inside, passed: list[str], query: str) -> None:
    place.ann.get("/api/datasets")
    for _ in range(2):
        assert place.ann.get(f"/api/jobs?{query}").status_code == 422
    assert passed == ["/api/datasets", "/api/jobs", "/api/jobs"]


def test_what_no_one_shares_goes_through_the_gate_each_time(place: Inside, passed: list[str]) -> None:
    for _ in range(2):
        assert place.ann.get("/api/datasets").status_code == 200
        assert place.ann.request("HEAD", "/api/jobs").status_code == 405
    assert passed == ["/api/datasets", "/api/jobs"] * 2


def test_another_tenant_and_another_query_are_answered_their_own(
    place: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    for who in (place.ann, place.bob):
        who.get("/api/datasets")
    begun: list[Key] = []
    begin = Answers.begin

    def noting(self: Answers, key: Key, make: Any, tables: Any) -> Any:
        begun.append(key)
        return begin(self, key, make, tables)

    monkeypatch.setattr(Answers, "begin", noting)
    for who, query in ((place.ann, b"limit=9"), (place.bob, b"limit=9"), (place.ann, b"limit=8")):
        assert who.get(f"/api/jobs?{query.decode()}").status_code == 200
    assert [(scope.tenant, query) for scope, _, query in begun] == [
        ("a", b"limit=9"),
        ("b", b"limit=9"),
        ("a", b"limit=8"),
    ]


@pytest.mark.parametrize("shown", [{"Authorization": "Bearer harli_nonsense"}, {"Authorization": ""}])
def test_who_is_not_known_gets_nothing(place: Inside, shown: dict[str, str]) -> None:
    assert place.admin.get("/api/jobs").status_code == 200
    assert place.admin.get("/api/jobs", headers=shown).status_code == 401


def test_a_token_that_was_revoked_gets_nothing(place: Inside) -> None:
    token = made(place.admin, "a", "leaver", "operator")
    with as_one(place.settings, token["token"]) as leaver:
        for _ in range(3):
            assert leaver.get("/api/jobs").status_code == 200
        place.ann.delete(f"/api/tokens/{token['id']}")
        assert place.ann.get("/api/jobs").status_code == 200
        assert leaver.get("/api/jobs").status_code == 401


def test_a_name_that_was_rebound_gets_nothing(place: Inside) -> None:
    assert place.ann.get("/api/jobs").status_code == 200
    assert place.ann.get("/api/jobs", headers={"Host": "evil.example"}).status_code == 403


def test_pages_are_told_whether_they_may_read_it(place: Inside) -> None:
    console = f"http://127.0.0.1:{place.settings.console_port}"

    def leave(origin: str) -> str | None:
        response: httpx.Response = place.ann.get("/api/jobs", headers={"Origin": origin})
        assert response.status_code == 200
        return response.headers.get("access-control-allow-origin")

    assert place.ann.get("/api/jobs").status_code == 200
    assert [leave(console), leave("https://evil.example")] == [console, None]


@pytest.mark.usefixtures("clock")
def test_it_is_taken_from_the_tokens_rate(data_dir: Path) -> None:
    with served(data_dir, requests_per_s=2) as settings, plain(settings) as http:
        found = [http.get("/api/jobs").status_code for _ in range(6)]
    assert found == [200] * 4 + [429] * 2
