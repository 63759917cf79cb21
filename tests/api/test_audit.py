"""Every change leaves a line, in the transaction that makes it; so does every one that was refused."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from core.api.gate import ASKS, LOOKS, SAFE
from core.control import audit
from core.control.context import Control
from core.control.principal import itself
from db import tenants
from db.audit import Actor, AuditRecord
from db.base import now
from tests.api.inside import Inside, inside, operations


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    with inside(tmp_path_factory.mktemp("audit")) as found:
        yield found


def newest(place: Inside, **filters: Any) -> dict[str, Any]:
    items = place.admin.get("/api/audit", params={"limit": 1, **filters}).json()["items"]
    found: dict[str, Any] = items[0]
    return found


def test_every_route_that_changes_something_leaves_a_line(place: Inside) -> None:
    seen = newest(place)["id"]
    mutating = [(method, path) for method, path, _ in operations(place.admin) if method not in SAFE]
    asked = [(method, path) for method, path in mutating if path not in (*ASKS, *LOOKS)]
    assert len(asked) > 20
    assert len(mutating) - len(asked) == len(ASKS) + len(LOOKS)
    for method, path in asked:
        response = place.admin.request(method, path.replace("{", "no-").replace("}", ""))
        line = newest(place)
        assert line["id"] > seen, f"{method} {path} ({response.status_code}) left none"
        assert line["action"] == f"{method} {path}"
        assert line["user"] == "admin"
        assert line["address"] == "127.0.0.1"
        assert line["outcome"] == ("done" if response.status_code < 400 else "refused"), response.text
        seen = line["id"]


def test_a_look_at_a_file_leaves_none_but_one_that_is_not_allowed_does(place: Inside) -> None:
    before = newest(place)["id"]
    for content, status in ((b"question,answer\nWho?,I.\n", 200), (b"\0\1", 422)):
        assert place.ann.post("/api/uploads/preview", files={"file": ("a.csv", content)}).status_code == status
    assert newest(place)["id"] == before
    with place.someone("a", "vera", "viewer") as vera:
        assert vera.post("/api/uploads/preview", files={"file": ("a.csv", b"text\nI.\n")}).status_code == 403
    line = newest(place)
    assert (line["action"], line["user"], line["outcome"]) == ("POST /api/uploads/preview", "vera", "refused")


def test_a_change_is_told_with_what_was_before(place: Inside) -> None:
    user = place.ann.post("/api/users", json={"name": "una", "role": "viewer"}).json()
    line = newest(place)
    assert (line["user"], line["tenant"], line["outcome"]) == ("ann", "a", "done")
    (change,) = line["changes"]
    assert (change["table"], change["id"], change["change"]) == ("users", user["id"], "added")
    assert change["fields"]["role"] == [None, "viewer"]
    place.ann.patch(f"/api/users/{user['id']}", json={"role": "operator"})
    line = newest(place)
    assert (line["action"], line["ref"]) == ("PATCH /api/users/{user_id}", user["id"])
    assert line["changes"][0]["fields"] == {"role": ["viewer", "operator"]}


def test_what_was_refused_says_why(place: Inside) -> None:
    place.bob.delete("/api/datasets/ds-none")
    line = newest(place)
    assert (line["user"], line["outcome"], line["status"], line["code"]) == (
        "bob", "refused", 404, "dataset_not_found",
    )  # fmt: skip
    place.bob.put("/api/targets", json={})
    line = newest(place)
    assert (line["action"], line["outcome"], line["code"]) == ("PUT /api/targets", "refused", "platform_only")


def test_whoever_has_the_answer_finds_it_in_the_log(place: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*arguments: Any) -> None:
        time.sleep(0.2)
        note(*arguments)

    note = audit.note
    monkeypatch.setattr(audit, "note", late)
    for path in ("/api/jobs/job-19/pause", "/api/alerts"):  # refused by the route, refused before it
        seen = newest(place)["id"]
        assert place.bob.post(path, json={}).status_code in {403, 404}
        assert newest(place)["id"] > seen, path


def test_who_shows_no_token_cannot_fill_it(place: Inside) -> None:
    before = newest(place)["id"]
    for _ in range(5):
        place.admin.post("/api/jobs", json={}, headers={"Authorization": "Bearer guess"})
    assert newest(place)["id"] == before


def test_it_is_found_by_user_text_outcome_and_time_a_page_at_a_time(place: Inside) -> None:
    place.ann.post("/api/jobs/job-17/pause")
    assert newest(place, user="ann", text="JOB-17")["action"] == "POST /api/jobs/{job_id}/pause"
    assert place.admin.get("/api/audit", params={"user": "ann", "outcome": "failed"}).json()["items"] == []
    later = {"since": "2999-01-01T00:00:00Z"}
    assert place.admin.get("/api/audit", params=later).json()["items"] == []
    ids: list[int] = []
    cursor = None
    while True:
        page = place.admin.get("/api/audit", params={"limit": 7, **({"cursor": cursor} if cursor else {})}).json()
        ids += [item["id"] for item in page["items"]]
        cursor = page["next"]
        if cursor is None:
            break
    assert ids == sorted(ids, reverse=True)
    assert len(ids) == len(set(ids))


def test_a_tenants_admin_sees_its_own_tenants_lines_only(place: Inside) -> None:
    place.ann.post("/api/jobs/job-1/pause")
    place.bob.post("/api/jobs/job-2/pause")
    assert {item["tenant"] for item in place.bob.get("/api/audit").json()["items"]} == {"b"}
    assert {"a", "b", "default"} <= {item["tenant"] for item in place.admin.get("/api/audit").json()["items"]}


def test_change_and_line_stand_or_fall_together(place: Inside, data_dir: Any) -> None:
    from core.config import Settings
    from core.control.context import open_control

    control: Control = open_control(Settings(data_dir=data_dir))
    actor = Actor("default", "ann", None, None, "POST /api/tenants", None)
    mine = control.of(itself(), actor)

    def break_off(_mapper: object, _connection: object, _record: object) -> None:
        raise OperationalError("INSERT INTO audit", {}, Exception("the disk is full"))

    event.listen(AuditRecord, "before_insert", break_off)
    try:
        with pytest.raises(OperationalError), mine.store.write() as session:
            session.add(tenants.TenantRecord(name="late", created_at=now(), suspended=False))
    finally:
        event.remove(AuditRecord, "before_insert", break_off)
    with control.store.read() as session:
        assert isinstance(session, Session)
        assert tenants.find(session, "late") is None
    assert not actor.noted
    control.store.close()
