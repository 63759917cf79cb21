"""Looks before an upload, checks that are watched and cancelled, aliases and merges, over HTTP."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from core.config import Settings
from core.intake import dataset
from tests.api.serving import headers, plain, served
from tests.api.test_upload import END, HEADERS, leaves_nothing, part, zipped
from tests.control import files
from tests.stack import until


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A check that lasts until it is cancelled; set once it has begun."""
    begun = threading.Event()

    def ingest(*_: object, progress: object, **__: object) -> None:
        for _ in range(3000):
            progress(5, 10)  # type: ignore[operator]
            begun.set()
            time.sleep(0.02)
        raise AssertionError("nobody cancelled the check")

    monkeypatch.setattr(dataset, "ingest", ingest)
    return begun


def test_a_file_is_looked_at_without_being_stored(http: httpx.Client, settings: Settings) -> None:
    content = "frage,reaktion\nWer?,Ich.\n"
    seen = http.post("/api/uploads/preview", files={"file": ("a.csv", content)}).json()
    assert (seen["format"], [column["name"] for column in seen["columns"]]) == (None, ["frage", "reaktion"])
    params = {"columns": json.dumps({"prompt": "frage", "completion": "reaktion"})}
    mapped = http.post("/api/uploads/preview", params=params, files={"file": ("a.csv", content)}).json()
    assert [message["content"] for message in mapped["rows"][0]["messages"]] == ["Wer?", "Ich."]
    refused = http.post("/api/uploads/preview", files={"file": ("a.bin", b"\0\1\2")})
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "unknown_format")
    assert leaves_nothing(settings)


def test_the_same_rows_answer_with_the_version_that_has_them(http: httpx.Client, tmp_path: Path) -> None:
    data = files.jsonl(tmp_path / "rivers.jsonl").read_bytes()
    first = http.post("/api/datasets", params={"name": "rivers"}, files={"file": ("a.jsonl", data)})
    again = http.post(
        "/api/datasets", params={"name": "rivers", "new_version": True}, files={"file": ("b.jsonl", b"\n" + data)}
    )
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json()["id"] == first.json()["id"]
    assert http.get("/api/datasets/rivers/rendered").json()["error"]["code"] == "no_tokenizer"


def test_a_check_is_watched_and_cancelled_by_its_id(
    http: httpx.Client, settings: Settings, slow: threading.Event
) -> None:
    answers: list[httpx.Response] = []

    def upload() -> None:
        with plain(settings) as other:
            params = {"name": "rivers", "operation": "check-0001"}
            answers.append(other.post("/api/datasets", params=params, files={"file": ("a.jsonl", b"{}\n")}))

    sender = threading.Thread(target=upload)
    sender.start()
    assert slow.wait(30)
    until(lambda: http.get("/api/operations/check-0001").json()["total"] == 10, what="the progress")
    assert http.post("/api/operations/check-0001/cancel").status_code == 200
    sender.join(30)  # by itself the check would take longer
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (409, "cancelled")
    assert http.get("/api/operations", params={"kind": "dataset"}).json()[0]["state"] == "cancelled"
    assert leaves_nothing(settings)


def test_a_caller_who_hangs_up_ends_the_check(settings: Settings, slow: threading.Event) -> None:
    body = part(b"{}\n") + END
    with socket.create_connection(("127.0.0.1", settings.api_port), 10) as connection:
        head = (
            "POST /api/datasets?name=rivers HTTP/1.1\r\nHost: localhost\r\n"
            f"Authorization: {headers(settings)['Authorization']}\r\n"
            f"Content-Type: {HEADERS['Content-Type']}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        assert slow.wait(30)
    until(lambda: leaves_nothing(settings), 30, "the check to end, which by itself would take longer")


def test_a_check_that_takes_longer_than_one_waits_goes_on_as_an_operation(
    http: httpx.Client, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingest, go_on = dataset.ingest, threading.Event()

    def held(*args: Any, **more: Any) -> Any:
        assert go_on.wait(60)
        return ingest(*args, **more)

    monkeypatch.setattr(dataset, "ingest", held)
    data = files.jsonl(tmp_path / "rivers.jsonl").read_bytes()

    def begin(name: str, content: bytes) -> str:
        response = http.post("/api/datasets", params={"name": name, "wait_s": 0}, files={"file": ("a.jsonl", content)})
        assert (response.status_code, response.json()["state"]) == (202, "running")
        assert response.headers["location"] == f"/api/operations/{response.json()['id']}"
        return response.headers["location"]

    def ended(operation: str) -> Any:
        return until(lambda: (found := http.get(operation).json())["state"] != "running" and found, what="its end")

    good, bad = begin("rivers", data), begin("broken", data + b"{broken\n")
    assert http.get("/api/datasets").json()["items"] == []
    go_on.set()
    made = ended(good)
    assert (made["state"], made["error"]) == ("succeeded", None)
    assert http.get(f"/api/datasets/{made['result']}").json()["name"] == "rivers"
    refused = ended(bad)
    assert (refused["state"], refused["result"]) == ("failed", None)
    assert (refused["error"]["status"], refused["error"]["code"]) == (422, "broken_json")
    assert refused["error"]["report"]["rows_read"] == 9
    # What does not take longer is answered as it is, whoever would have waited.
    params = {"name": "lakes", "wait_s": 20}
    assert http.post("/api/datasets", params=params, files={"file": ("a.jsonl", data)}).status_code == 201
    assert not any((settings.data_dir / "uploads").iterdir())


def test_of_an_operation_that_has_ended_nothing_is_left(
    http: httpx.Client, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = Path.unlink

    def late(path: Path, missing_ok: bool = False) -> None:
        if path.name.startswith("kept-"):
            time.sleep(0.3)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", late)
    params = {"name": "rivers", "wait_s": 0}
    begun = http.post("/api/datasets", params=params, files={"file": ("a.jsonl", b"{broken\n")})
    assert begun.status_code == 202
    until(lambda: http.get(begun.headers["location"]).json()["state"] == "failed", what="its end", pause_s=0.01)
    assert leaves_nothing(settings)


def test_an_id_that_is_taken_is_found_out_before_the_body_is_read(http: httpx.Client, tmp_path: Path) -> None:
    data = files.jsonl(tmp_path / "rivers.jsonl").read_bytes()
    params = {"name": "rivers", "operation": "check-0001"}
    assert http.post("/api/datasets", params=params, files={"file": ("a.jsonl", data)}).status_code == 201
    again = http.post("/api/datasets", params={**params, "name": "lakes"}, content=b"", headers=HEADERS)
    assert (again.status_code, again.json()["error"]["code"]) == (409, "operation_exists")


def test_an_api_that_ends_does_not_wait_for_checks(data_dir: Path, slow: threading.Event) -> None:
    with served(data_dir) as settings, plain(settings) as http:
        begun = http.post("/api/datasets", params={"name": "rivers", "wait_s": 0}, files={"file": ("a.jsonl", b"{}")})
        assert begun.status_code == 202
        assert slow.wait(30)
    # By itself the check would have taken longer than `served` waits.
    with served(data_dir) as settings, plain(settings) as http:
        assert http.get(begun.headers["location"]).json()["state"] == "cancelled"
        assert leaves_nothing(settings)


def test_aliases_are_promoted_rolled_back_and_deleted(http: httpx.Client, tmp_path: Path) -> None:
    archive = zipped(files.adapter(tmp_path / "captain"))
    for new_version in (False, True):
        http.post("/api/adapters", params={"name": "captain", "new_version": new_version}, files={"file": archive})
    url = "/api/adapters/captain/aliases/prod"
    assert http.put(url, json={"version": 1}).json()["aliases"][0]["address"] == "captain@prod"
    assert http.put(url).json()["aliases"][0]["history"] == [1]
    assert http.post(f"{url}/rollback").json()["aliases"][0]["wanted_version"] == 1
    assert http.post(f"{url}/rollback").json()["error"]["code"] == "no_earlier_version"
    assert http.put("/api/adapters/captain/aliases/7").status_code == 422
    job = {"dataset": "rivers", "adapter_name": "mate", "initial_adapter": "captain@prod"}
    data = files.jsonl(tmp_path / "rivers.jsonl").read_bytes()
    http.post("/api/datasets", params={"name": "rivers"}, files={"file": ("a.jsonl", data)})
    assert http.post("/api/jobs", json=job).status_code == 201
    assert http.delete(url).status_code == 204
    assert http.get("/api/adapters/captain").json()["aliases"] == []


def test_adapters_are_merged_and_a_merge_into_the_base_needs_one(http: httpx.Client, tmp_path: Path) -> None:
    archive = zipped(files.adapter(tmp_path / "captain"))
    http.post("/api/adapters", params={"name": "captain"}, files={"file": archive})
    parts = [{"adapter": "captain"}, {"adapter": "captain@1", "weight": -0.5}]
    made = http.post("/api/adapters/both/merge", json={"parts": parts})
    assert made.status_code == 201, made.text
    assert made.json()["versions"][0]["parents"] == ["captain@1*1", "captain@1*-0.5"]
    assert http.post("/api/adapters/captain/merged").json()["error"]["code"] == "no_model"
    assert http.get("/api/operations/none-there/download").status_code == 404
