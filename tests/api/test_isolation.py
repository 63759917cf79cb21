"""What belongs to one tenant is not there for another: tried on every route that the API describes."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from core.link.messages import Hello
from db.adapters import AdapterRecord
from db.base import now
from db.engines import EngineRecord
from db.store import Store
from tests.api.inside import Inside, inside, operations
from tests.api.test_events import listening
from tests.clock import far_off
from tests.control import files
from tests.stack import until

# In every name and text of tenant a, and in nothing else.
MARK = "zanzibar"
JOB = {"dataset": f"{MARK}-rows", "adapter_name": f"{MARK}-new"}
# The audit log has what its own tenant asked with; it has tests of its own.
NOT_LISTED = {"/api/events", "/api/doctor", "/api/frontier", "/api/audit"}
# Routes on what is everyone's, or the platform's, or one's own: nothing of another tenant could be named.
NOT_OWNED = {"/api/alerts/rules/{name}", "/api/names/datasets/{name}", "/api/names/adapters/{name}"}
BODIES: dict[str, Any] = {
    "PATCH /api/jobs/{job_id}": {"name": "mine now"},
    "POST /api/jobs/{job_id}/move": {"to": "top"},
    "PATCH /api/schedules/{schedule_id}": {"enabled": False},
    "PATCH /api/webhooks/{webhook_id}": {"enabled": False},
    "PATCH /api/users/{user_id}": {"role": "viewer"},
    "PATCH /api/tenants/{tenant}": {"suspended": True},
    "PUT /api/quotas/{tenant}": {},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    with inside(tmp_path_factory.mktemp("isolation")) as found:
        yield found


def good(response: httpx.Response) -> Any:
    assert response.status_code < 300, response.text
    return response.json()


@pytest.fixture(scope="module")
def owned(place: Inside, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What tenant a has, by the name of the parameter that a route would take it in."""
    folder = tmp_path_factory.mktemp("files")
    rows = files.jsonl(folder / "rows.jsonl").read_bytes().replace(b"river", MARK.encode())
    send = {"file": (f"{MARK}.jsonl", rows)}
    asked = {"name": f"{MARK}-rows", "operation": f"op-{MARK}"}
    dataset = good(place.ann.post("/api/datasets", params=asked, files=send))
    upload = {"file": ("adapter.zip", _zip(files.adapter(folder / "adapter")))}
    good(place.ann.post("/api/adapters", params={"name": f"{MARK}-bot"}, files=upload))
    job = good(place.ann.post("/api/jobs", json={**JOB, "name": f"{MARK} job"}, headers={"Idempotency-Key": "press"}))
    schedule = {"name": f"{MARK}-nightly", "cron": far_off(), "job": {**JOB, "adapter_name": f"{MARK}-cron"}}
    scheduled = good(place.ann.post("/api/schedules", json=schedule))
    webhook = good(place.ann.post("/api/webhooks", json={"url": f"https://{MARK}.example/hook"}))
    sent = good(place.ann.post(f"/api/webhooks/{webhook['id']}/test"))
    file = good(
        place.ann.post("/v1/files", data={"purpose": "fine-tune"}, files={"file": (f"{MARK}-more.jsonl", rows)})
    )
    serve(place, f"{MARK}-bot")
    user, token = (good(place.ann.get(f"/api/{kind}"))[0]["id"] for kind in ("users", "tokens"))
    return {
        "dataset": [dataset["id"], f"{MARK}-rows"],
        "job_id": [job["id"]],
        "name": [f"{MARK}-bot"],
        "alias": ["prod"],
        "schedule_id": [scheduled["id"]],
        "webhook_id": [webhook["id"]],
        "delivery_id": [str(sent["id"])],
        "file_id": [file["id"]],
        "user_id": [user],
        "token_id": [token],
        "tenant": ["a"],
        "operation": [f"op-{MARK}"],
        "model": [f"{MARK}-bot"],
    }


def serve(place: Inside, name: str) -> None:
    """Write down that an engine is there and serves the adapter; it answers nobody."""
    hello = Hello(
        engine_id="engine-1",
        pid=1,
        http_url="http://127.0.0.1:1",
        model="small",
        model_path="/nowhere",
        device="cpu",
        device_name="none",
        dtype="float32",
        parameters=1,
        versions={},
        max_lora_rank=16,
        lora_modules=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        kv_tokens=1,
        max_running_requests=1,
        partitions=("whole",),
    )
    store = Store(place.settings.resolved_database_url)
    with store.write() as session:
        plain = msgspec.to_builtins(hello)
        session.add(EngineRecord(id="engine-1", state="ready", hello=plain, since=now(), state_since=now()))
        record = session.get_one(AdapterRecord, name)
        record.wanted_version = record.deployed_version = 1
        record.engine_id, record.deployment = "engine-1", "deployed"
    store.close()


def _zip(folder: Path) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for member in folder.iterdir():
            archive.write(member, member.name)
    return data.getvalue()


def state_of(one: httpx.Client) -> str:
    """All that someone has."""
    kinds = ("datasets", "adapters", "jobs", "schedules", "webhooks", "users", "tokens", "tenants")
    found = {kind: one.get(f"/api/{kind}").json() for kind in kinds}
    for token in found["tokens"]:
        token.pop("last_used_at")
    return json.dumps(found, sort_keys=True)


def tells_nothing(response: httpx.Response, *asked: str) -> bool:
    """Whether an answer has nothing of tenant a but what was asked with."""
    text = response.text
    for value in asked:
        text = text.replace(value, "")
    return MARK not in text


def test_no_route_gives_or_changes_anything_of_another_tenant(place: Inside, owned: dict[str, list[str]]) -> None:
    before = state_of(place.ann)
    tried = 0
    for method, path, operation in operations(place.bob):
        names = [one["name"] for one in operation.get("parameters", []) if one["in"] == "path"]
        if not names or path in NOT_OWNED:
            continue
        for number in range(max(len(owned[name]) for name in names)):
            values = {name: owned[name][min(number, len(owned[name]) - 1)] for name in names}
            url = path.format(**values)
            response = place.bob.request(method, url, json=BODIES.get(f"{method} {path}"))
            expected = (403, 404) if "{tenant}" in path else (404,)
            if path.endswith("/merge"):
                expected = (422,)  # it makes the name, out of adapters that the body names: see below
            assert response.status_code in expected, f"{method} {url}: {response.status_code} {response.text}"
            assert tells_nothing(response, *values.values()), f"{method} {url}: {response.text}"
            tried += 1
    assert tried > 40
    assert state_of(place.ann) == before, "nothing of it has changed"


def test_no_listing_shows_anything_of_another_tenant(place: Inside, owned: dict[str, list[str]]) -> None:
    kinds = [name for name in owned if name.endswith("_id") and name != "delivery_id"]
    ids = [value for name in kinds for value in owned[name]]
    tried = 0
    for method, path, _ in operations(place.bob):
        if method != "GET" or "{" in path or path in NOT_LISTED:
            continue
        response = place.bob.get(path)
        assert response.status_code in (200, 403, 422), f"{path}: {response.text}"
        assert MARK not in response.text, f"{path}: {response.text}"
        assert not [value for value in ids if value in response.text], path
        tried += 1
    assert tried > 15


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/api/jobs", {"dataset": "{dataset}", "adapter_name": "mine"}),
        ("POST", "/api/jobs", {"dataset": f"{MARK}-rows", "adapter_name": "mine"}),
        ("POST", "/api/jobs/estimate", {"dataset": "{dataset}", "adapter_name": "mine"}),
        ("POST", "/api/jobs", {"dataset": "own-rows", "adapter_name": "mine", "initial_adapter": f"{MARK}-bot"}),
        ("POST", "/api/adapters/mine/merge", {"parts": [{"adapter": f"{MARK}-bot"}, {"adapter": f"{MARK}-bot@1"}]}),
        ("GET", "/api/jobs/compare?job_id={job_id}&job_id={job_id}", None),
        ("POST", "/v1/fine_tuning/jobs", {"training_file": "{file_id}", "model": f"{MARK}-bot"}),
        ("POST", "/api/tokens", {"name": "theirs", "user": "{user_id}"}),
        ("POST", "/v1/chat/completions", {"model": f"{MARK}-bot", "messages": []}),
        ("POST", "/v1/completions", {"model": f"small:{MARK}-bot", "prompt": "x"}),
    ],
)
def test_nothing_of_another_tenant_can_be_used(
    place: Inside, owned: dict[str, list[str]], tmp_path: Path, method: str, path: str, body: Any
) -> None:
    if "own-rows" in str(body):
        send = {"file": ("rows.jsonl", files.jsonl(tmp_path / "rows.jsonl").read_bytes())}
        place.bob.post("/api/datasets", params={"name": "own-rows"}, files=send)
    text = json.dumps(body)
    for name, values in owned.items():
        text, path = text.replace(f"{{{name}}}", values[0]), path.replace(f"{{{name}}}", values[0])
    response = place.bob.request(method, path, json=json.loads(text))
    assert response.status_code in (400, 404), f"{response.status_code} {response.text}"


def test_its_own_tenant_reaches_a_served_adapter(place: Inside, owned: dict[str, list[str]]) -> None:
    for asked in (place.ann, place.admin):
        response = asked.post("/v1/chat/completions", json={"model": f"{MARK}-bot", "messages": []})
        assert response.status_code == 503, "it is passed on to the engine, which is not there"


def test_names_of_data_sets_are_each_tenants_own(place: Inside, owned: dict[str, list[str]], tmp_path: Path) -> None:
    send = {"file": ("rows.jsonl", files.jsonl(tmp_path / "rows.jsonl", rows=5).read_bytes())}
    name = f"{MARK}-rows"
    assert good(place.bob.get(f"/api/names/datasets/{name}"))["available"]
    mine = good(place.bob.post("/api/datasets", params={"name": name}, files=send))
    assert (mine["version"], mine["tenant"]) == (1, "b")
    assert good(place.bob.get(f"/api/datasets/{name}"))["report"]["rows"] == 5
    assert good(place.ann.get(f"/api/datasets/{name}"))["report"]["rows"] == 8
    assert place.bob.delete(f"/api/datasets/{name}").status_code == 204
    assert good(place.ann.get(f"/api/datasets/{name}"))["id"] == owned["dataset"][0]


def test_a_served_name_is_one_tenants_only_and_says_no_more(
    place: Inside, owned: dict[str, list[str]], tmp_path: Path
) -> None:
    check = good(place.bob.get(f"/api/names/adapters/{MARK}-bot"))
    assert not check["available"]
    assert "one tenant's only" in check["reason"]
    upload = {"file": ("adapter.zip", _zip(files.adapter(tmp_path / "adapter")))}
    for params in ({}, {"new_version": "true"}):
        taken = place.bob.post("/api/adapters", params={"name": f"{MARK}-bot", **params}, files=upload)
        assert (taken.status_code, taken.json()["error"]["code"]) == (409, "name_taken")
    send = {"file": ("rows.jsonl", files.jsonl(tmp_path / "rows.jsonl").read_bytes())}
    good(place.bob.post("/api/datasets", params={"name": "bobs"}, files=send))
    for name in (f"{MARK}-bot", f"{MARK}-new"):
        job = place.bob.post("/api/jobs", json={"dataset": "bobs", "adapter_name": name})
        assert (job.status_code, job.json()["error"]["code"]) == (409, "name_taken"), job.text
        assert owned["job_id"][0] not in job.text


def test_an_idempotency_key_is_each_tenants_own(place: Inside, owned: dict[str, list[str]], tmp_path: Path) -> None:
    send = {"file": ("rows.jsonl", files.jsonl(tmp_path / "rows.jsonl").read_bytes())}
    place.bob.post("/api/datasets", params={"name": "keyed"}, files=send)
    body = {"dataset": "keyed", "adapter_name": "keyed"}
    job = good(place.bob.post("/api/jobs", json=body, headers={"Idempotency-Key": "press"}))
    assert job["tenant"] == "b"
    assert job["id"] != owned["job_id"][0]


def test_events_are_told_to_those_whose_they_are(place: Inside, owned: dict[str, list[str]]) -> None:
    (job,) = owned["job_id"]
    with listening(place.ann) as ann, listening(place.bob) as bob, listening(place.admin) as admin:
        good(place.ann.patch(f"/api/jobs/{job}", json={"priority": -3}))
        version = good(place.admin.get("/api/targets"))["version"]
        good(place.admin.put("/api/targets", json={"version": version, "targets": [{"kind": "itl", "ms": 50}]}))
        until(
            lambda: all(any(e.topic == "targets" for _, e in heard) for heard in (ann, bob, admin)), what="the targets"
        )
        assert any(event.id == job for _, event in ann)
        assert any(event.id == job for _, event in admin)
        assert {event.topic for _, event in bob} <= {"targets", "engine", "telemetry"}


def test_the_platforms_admin_sees_all_and_acts_for_all(place: Inside, owned: dict[str, list[str]]) -> None:
    (job,) = owned["job_id"]
    assert good(place.admin.get(f"/api/jobs/{job}"))["tenant"] == "a"
    assert job in {item["id"] for item in good(place.admin.get("/api/jobs"))["items"]}
    assert good(place.admin.patch(f"/api/jobs/{job}", json={"priority": 1}))["priority"] == 1
    assert place.admin.get(f"/api/datasets/{MARK}-rows").status_code == 404, "a name is of one's own tenant"
