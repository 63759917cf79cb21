"""The routes over plain HTTP, as a program without our client sees them."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import httpx
import pyarrow.parquet as pq
import pytest
from prometheus_client.parser import text_string_to_metric_families

from core.config import Settings
from tests.api.test_upload import zipped
from tests.control import files
from tests.stack import until


@pytest.fixture
def rivers(http: httpx.Client, tmp_path: Path) -> str:
    """The id of a data set."""
    data = files.jsonl(tmp_path / "rivers.jsonl").read_bytes()
    response = http.post("/api/datasets", params={"name": "rivers"}, files={"file": ("rivers.jsonl", data)})
    assert response.status_code == 201, response.text
    return str(response.json()["id"])


def test_health_says_what_the_process_is(http: httpx.Client) -> None:
    health = http.get("/api/health").json()
    assert (health["status"], health["database"], health["dispatcher"]) == ("ok", "sqlite", True)
    assert health["max_upload_bytes"] == 1 << 20


def test_a_data_set_from_upload_to_deletion(http: httpx.Client, rivers: str) -> None:
    assert [item["id"] for item in http.get("/api/datasets").json()["items"]] == [rivers]
    assert http.get("/api/datasets/rivers").json()["id"] == rivers
    rows = http.get(f"/api/datasets/{rivers}/rows", params={"offset": 7, "limit": 5}).json()
    assert [row["index"] for row in rows] == [7]
    download = http.get(f"/api/datasets/{rivers}/download")
    assert 'filename="rivers-1.parquet"' in download.headers["content-disposition"]
    assert pq.read_table(io.BytesIO(download.content)).num_rows == 8
    assert http.get(f"/api/datasets/{rivers}/packed").json()["error"]["code"] == "no_tokenizer"
    assert http.delete(f"/api/datasets/{rivers}").status_code == 204
    assert http.get(f"/api/datasets/{rivers}").status_code == 404


def test_a_job_from_submission_to_its_end(http: httpx.Client, rivers: str) -> None:
    key = {"Idempotency-Key": "press-1"}
    job = {"dataset": "rivers", "adapter_name": "sailor"}
    first, again = (http.post("/api/jobs", json=job, headers=key) for _ in range(2))
    assert (first.status_code, again.status_code) == (201, 200)
    made = first.json()
    assert again.json()["id"] == made["id"]
    assert (made["state"], made["dataset_id"]) == ("queued", rivers)
    url = f"/api/jobs/{made['id']}"
    assert http.delete(f"/api/datasets/{rivers}").status_code == 409
    assert http.patch(url, json={"priority": 4}).json()["priority"] == 4
    assert http.post(f"{url}/pause").json()["state"] == "paused"
    assert http.post(f"{url}/resume").json()["state"] == "queued"
    assert http.post(f"{url}/stop", json={"save": True}).json()["error"]["code"] == "nothing_to_save"
    assert http.post(f"{url}/stop").json()["state"] == "cancelled"
    refused = http.post(f"{url}/pause")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "job_state")
    events = http.get(f"{url}/events").json()
    assert [event["kind"] for event in events] == ["submitted", "priority", "paused", "resumed", "cancelled"]
    assert http.get(f"{url}/events", params={"after": events[-2]["id"]}).json() == events[-1:]
    assert http.get(f"{url}/metrics").json() == []
    assert [line["message"].partition(":")[0] for line in http.get(f"{url}/log").json()][-1] == "cancelled"
    assert http.get("/api/jobs", params={"state": "cancelled"}).json()["items"][0]["id"] == made["id"]


def test_an_adapter_from_upload_to_deletion(http: httpx.Client, tmp_path: Path) -> None:
    archive = zipped(files.adapter(tmp_path / "captain"))
    made = http.post("/api/adapters", params={"name": "captain"}, files={"file": archive})
    assert made.status_code == 201, made.text
    more = http.post("/api/adapters", params={"name": "captain", "new_version": True}, files={"file": archive})
    assert [version["version"] for version in more.json()["versions"]] == [1, 2]
    assert http.post("/api/adapters/captain/deploy").json()["wanted_version"] == 2
    assert http.post("/api/adapters/captain/deploy", json={"version": 1}).json()["wanted_version"] == 1
    assert http.post("/api/adapters/captain/undeploy").json()["deployment"] == "none"
    download = http.get("/api/adapters/captain/download", params={"version": 1})
    with zipfile.ZipFile(io.BytesIO(download.content)) as found:
        assert sorted(found.namelist()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert http.delete("/api/adapters/captain", params={"version": 1}).status_code == 204
    assert [version["version"] for version in http.get("/api/adapters/captain").json()["versions"]] == [2]
    assert http.delete("/api/adapters/captain").status_code == 204
    assert http.get("/api/adapters").json()["items"] == []


def test_nothing_is_left_of_a_download(http: httpx.Client, settings: Settings, tmp_path: Path) -> None:
    archive = zipped(files.adapter(tmp_path / "captain"))
    http.post("/api/adapters", params={"name": "captain"}, files={"file": archive})
    assert http.get("/api/adapters/captain/download").status_code == 200
    until(lambda: not any((settings.data_dir / "uploads").iterdir()), what="the temporary file to go")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "peft_type"),
    ],
)
def test_an_adapter_that_cannot_be_served_is_refused_with_the_reason(
    http: httpx.Client, settings: Settings, tmp_path: Path, change: dict[str, object], param: str
) -> None:
    archive = zipped(files.adapter(tmp_path / "odd", **change))
    response = http.post("/api/adapters", params={"name": "odd"}, files={"file": archive})
    assert (response.status_code, response.json()["error"]["param"]) == (422, param)
    assert list((settings.data_dir / "adapters").iterdir()) == []
    assert list((settings.data_dir / "uploads").iterdir()) == []


def test_a_broken_archive_is_called_by_the_name_under_which_it_came(http: httpx.Client) -> None:
    response = http.post("/api/adapters", params={"name": "odd"}, files={"file": ("captain v2.zip", b"PK, or not")})
    assert response.status_code == 422
    assert response.json()["error"]["message"].startswith("captain v2.zip cannot be read")


def test_an_archive_that_reaches_outside_is_refused_whole(http: httpx.Client, settings: Settings) -> None:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("adapter_config.json", json.dumps({"peft_type": "LORA"}))
        archive.writestr("../../outside", "x")
    response = http.post("/api/adapters", params={"name": "evil"}, files={"file": ("evil.zip", data.getvalue())})
    assert response.status_code == 422
    assert not (settings.data_dir.parent / "outside").exists()
    assert http.get("/api/adapters").json()["items"] == []


def test_metrics_are_in_prometheus_format(http: httpx.Client) -> None:
    http.put("/api/targets", json={"version": 0, "targets": [{"kind": "itl", "ms": 45}]})
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found = {family.name: family for family in text_string_to_metric_families(response.text)}
    assert found["harli_target_seconds"].samples[0].value == 0.045
    assert {sample.labels["state"] for sample in found["harli_jobs"].samples} >= {"queued", "running", "succeeded"}


def test_the_description_names_every_route_its_errors_and_its_files(http: httpx.Client) -> None:
    described = http.get("/api/openapi.json").json()
    paths = described["paths"]
    assert {"/api/jobs", "/api/jobs/{job_id}/stop", "/api/datasets", "/api/targets", "/metrics"} <= paths.keys()
    for path, methods in paths.items():
        for method, operation in methods.items():
            assert operation["summary"], f"{method} {path}"
            error = operation["responses"]["422"]["content"]["application/json"]["schema"]
            assert error == {"$ref": "#/components/schemas/ErrorBody"}
    upload = paths["/api/datasets"]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert upload["properties"]["file"]["format"] == "binary"
