"""Every error is {"error": {"code", "message", "param"}} and says place, value and remedy."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from psycopg.errors import AdminShutdown, DiskFull
from pydantic import ValidationError
from safetensors import SafetensorError
from sqlalchemy import create_engine
from sqlalchemy.exc import OperationalError

from core.api import schemas
from core.api.errors import explain, install
from core.errors import full_disk

JOB = {"dataset": "rivers", "adapter_name": "sailor"}


def explained(model: Any, body: object) -> tuple[str, str]:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    errors = [{**error, "loc": ("body", *error["loc"])} for error in caught.value.errors()]
    return explain(errors, model)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"dataset": "x"}, "adapter_name", "adapter_name is missing; give it"),
        (JOB | {"learning_rate": 0}, "learning_rate", "learning_rate is 0; it should be greater than 0"),
        (JOB | {"epochs": "many"}, "epochs", 'epochs is "many"; it should be a valid number'),
        (JOB | {"lora": {"rnk": 4}}, "lora.rnk", "lora.rnk is not a field of this request; did you mean rank?"),
        (JOB | {"xyzzy": 1}, "xyzzy", "xyzzy is not a field of this request; there are: dataset, preset, adapter_name"),
        (JOB | {"adapter_name": "My Bot"}, "adapter_name", 'adapter_name is "My Bot"; use lower-case letters'),
        (JOB | {"schedule": "stairs"}, "schedule", "schedule is \"stairs\"; it should be 'cosine', 'linear' or"),
        (JOB | {"lora": {"target_modules": []}}, "lora.target_modules", "it should have at least 1 item"),
        ([], "body", "body is []; it should be a valid dictionary"),
        (JOB | {"weight_decay": float("inf")}, "weight_decay", "weight_decay is inf; it should be a finite number"),
        (JOB | {"lora": {"alpha": float("inf")}}, "lora.alpha", "lora.alpha is inf; it should be a finite number"),
        (
            JOB | {"name": "a\ud800"},
            "name",
            'name is "a\\ud800"; it should be a valid string',
        ),
        (JOB | {"sample_prompts": ["a", "\udfff"]}, "sample_prompts.1", "it should be a valid string"),
        (JOB | {"\ud800": 1}, "body", 'body is "\\ud800"; it should be a valid string'),
    ],
)
def test_what_is_wrong_with_a_job_is_said_with_its_remedy(body: object, param: str, message: str) -> None:
    found = explained(schemas.JobCreate, body)
    assert found[0] == param
    assert message in found[1]


@pytest.mark.parametrize(
    ("ms", "message"),
    [
        (0, "targets.0.ms is 0; it should be greater than 0"),
        (-3, "greater than 0"),
        ("fast", 'targets.0.ms is "fast"; it should be a valid number'),
        (float("nan"), "targets.0.ms is nan; it should be a finite number"),
        (float("inf"), "finite number"),
        (None, "targets.0.ms is None; it should be a valid number"),
    ],
)
def test_a_target_that_is_no_time_is_refused(ms: object, message: str) -> None:
    body = {"version": 0, "targets": [{"kind": "itl", "ms": ms}]}
    found = explained(schemas.TargetsUpdate, body)
    assert found[0] == "targets.0.ms"
    assert message in found[1]


def test_a_misspelt_field_is_named_before_the_one_that_is_missing_for_it() -> None:
    param, message = explained(schemas.JobCreate, {"datset": "rivers", "adapter_name": "a"})
    assert param == "datset"
    assert message == "datset is not a field of this request; did you mean dataset?; dataset is missing; give it"


def test_many_faults_are_counted_and_long_values_cut() -> None:
    body = JOB | {"seed": -1, "epochs": "x" * 500, "warmup_ratio": 3, "accumulation": 0, "schedule": 1}
    _, message = explained(schemas.JobCreate, body)
    assert message.endswith("and 2 more")
    assert len(message) < 600


@pytest.mark.parametrize(
    ("model", "body", "param"),
    [
        (schemas.JobCreate, JOB | {"deploy": 1}, "deploy"),
        (schemas.JobCreate, JOB | {"priority": "3"}, "priority"),
        (schemas.JobCreate, JOB | {"lora": {"use_rslora": "yes"}}, "lora.use_rslora"),
        (schemas.JobCreate, JOB | {"deadline": 1800000000}, "deadline"),
        (schemas.JobCreate, JOB | {"deadline": "1800000000"}, "deadline"),
        (schemas.JobStop, {"save": "on"}, "save"),
        (schemas.TargetsUpdate, {"version": True, "targets": []}, "version"),
    ],
)
def test_a_value_of_another_type_than_is_described_is_refused(model: Any, body: dict[str, Any], param: str) -> None:
    assert explained(model, body)[0] == param


def ask(app: FastAPI, path: str) -> httpx.Response:
    """As a server would: what the application raises after its answer is the log's."""

    async def asked() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
            return await client.get(path)

    return asyncio.run(asked())


def test_a_fault_has_the_shape_of_the_api_that_was_asked() -> None:
    app = FastAPI()
    install(app)

    @app.get("/{api}/fault")
    def fail(api: str) -> None:
        raise RuntimeError("secret")

    ours, openais = ask(app, "/api/fault"), ask(app, "/v1/fault")
    assert ours.status_code == openais.status_code == 500
    assert ours.json()["error"].keys() == {"code", "message", "param"}
    assert openais.json()["error"].keys() == {"code", "message", "param", "type"}
    assert openais.json()["error"]["type"] == "server_error"
    assert "secret" not in ours.text + openais.text


def test_a_full_disk_is_told_with_its_remedy_and_other_faults_stay_faults() -> None:
    app = FastAPI()
    install(app)

    @app.get("/{path}")
    def write(path: str) -> None:
        with open(f"/dev/{path}", "wb") as file:  # the kernel's own full device
            file.write(b"x")

    full = ask(app, "/full")
    assert (full.status_code, full.json()["error"]["code"]) == (503, "disk_full")
    assert "free some of it" in full.json()["error"]["message"]
    assert ask(app, "/fd").json()["error"]["code"] == "internal", "a folder cannot be written"


def test_a_store_without_room_is_told_as_a_full_disk(tmp_path: Path) -> None:
    app, engine = FastAPI(), create_engine(f"sqlite:///{tmp_path}/store.db")
    install(app)

    @app.get("/fill")
    def fill() -> None:
        with engine.begin() as connection:
            connection.exec_driver_sql("PRAGMA max_page_count = 4")
            connection.exec_driver_sql("CREATE TABLE filled (text TEXT)")
            connection.exec_driver_sql("INSERT INTO filled VALUES (?)", ("x" * 100_000,))

    full = ask(app, "/fill")
    assert (full.status_code, full.json()["error"]["code"]) == (503, "disk_full")
    assert "free some of it" in full.json()["error"]["message"]


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), True),
        (SafetensorError("Error while serializing: I/O error: Permission denied (os error 13)"), False),
        (shutil.Error([("a", "b", "[Errno 28] No space left on device")]), True),
        (OperationalError("INSERT", {}, DiskFull("could not extend file")), True),
        (OperationalError("INSERT", {}, AdminShutdown("terminating connection")), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_libraries_say_in_their_own_way_that_a_disk_is_full(error: Exception, full: bool) -> None:
    assert (full_disk(error) is not None) is full


def test_what_is_there_is_said_where_a_method_is_not(http: httpx.Client) -> None:
    for path, methods in {
        "/api/jobs": "GET, POST",
        "/api/jobs/job-1": "DELETE, GET, PATCH",
        "/api/health": "GET",
        "/v1/files": "GET, POST",
    }.items():
        response = http.request("TRACE", path)
        assert (response.status_code, response.headers["allow"]) == (405, methods), path


def error(response: httpx.Response, status: int) -> schemas.ErrorDetail:
    assert response.status_code == status, response.text
    return schemas.ErrorBody.model_validate_json(response.content).error


def test_over_http_each_kind_has_its_status(http: httpx.Client) -> None:
    assert error(http.get("/api/jobs/job-none"), 404).code == "job_not_found"
    assert error(http.get("/api/nothing"), 404).code == "route_not_found"
    assert error(http.delete("/api/engine"), 405).code == "method_not_allowed"
    broken = http.post("/api/jobs", content=b"{", headers={"Content-Type": "application/json"})
    assert (error(broken, 422).param, "not JSON" in error(broken, 422).message) == ("body", True)
    assert error(http.get("/api/jobs", params={"limit": 0}), 422).param == "limit"
    assert error(http.get("/api/jobs", params={"state": "lost"}), 422).param == "state"
    assert error(http.get("/api/jobs", params={"cursor": "%%"}), 422).code == "cursor"
    job = {"dataset": "rivers", "adapter_name": "sailor"}
    assert error(http.post("/api/jobs", json=job), 404).param == "dataset"
    text = '{"version": 0, "targets": [{"kind": "itl", "ms": NaN}]}'
    put = http.put("/api/targets", content=text, headers={"Content-Type": "application/json"})
    assert error(put, 422).param == "targets.0.ms"
    put = http.put("/api/targets", json={"version": 4, "targets": []})
    assert "in force: none" in error(put, 409).message


# With halves of surrogate pairs, which JSON can write.
TEXT = st.text(st.characters(exclude_categories=()), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
NAMES = [*schemas.JobCreate.model_fields, *schemas.LoraBody.model_fields, "version", "targets", "save", "kind", "ms"]
FIELDS = st.sampled_from(NAMES)
OBJECTS = st.dictionaries(FIELDS, JSON, max_size=3)
BODIES = JSON | st.dictionaries(FIELDS, JSON | OBJECTS | st.lists(OBJECTS, max_size=3), max_size=6)
WRITES = [
    ("POST", "/api/jobs"),
    ("PUT", "/api/targets"),
    ("PATCH", "/api/jobs/x"),
    ("POST", "/api/jobs/x/stop"),
    ("POST", "/api/adapters/x/deploy"),
    ("POST", "/api/schedules"),
    ("POST", "/api/webhooks"),
    ("POST", "/api/users"),
    ("POST", "/v1/fine_tuning/jobs"),
]
READS = [
    "/api/jobs", "/api/datasets", "/api/adapters", "/api/telemetry", "/api/live", "/api/jobs/x/events",
    "/api/jobs/x/metrics", "/api/jobs/x/log", "/api/datasets/x/rows", "/api/datasets/x/packed",
]  # fmt: skip
PARAMS = st.sampled_from(
    ["limit", "cursor", "state", "after", "offset", "seconds", "points", "window_s", "seed", "micro_batch_tokens"]
)
_fuzz = hypothesis_settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@_fuzz
@given(route=st.sampled_from(WRITES), body=BODIES)
def test_no_body_makes_a_fault(http_on_each: httpx.Client, route: tuple[str, str], body: object) -> None:
    response = http_on_each.request(*route, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        error(response, response.status_code)


@_fuzz
@given(
    path=st.sampled_from(READS),
    params=st.dictionaries(PARAMS, st.text(max_size=30) | st.integers(-(2**70), 2**70) | st.floats(), max_size=4),
)
def test_no_query_makes_a_fault(http_on_each: httpx.Client, path: str, params: dict[str, Any]) -> None:
    response = http_on_each.get(path, params=params)
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        error(response, response.status_code)


@_fuzz
@given(name=st.text(min_size=1, max_size=130), kind=st.sampled_from(["datasets", "adapters", "jobs", "names/datasets"]))
def test_no_name_makes_a_fault(http_on_each: httpx.Client, name: str, kind: str) -> None:
    response = http_on_each.get(f"/api/{kind}/{quote(name, safe='')}")
    assert response.status_code < 500, response.text


def test_a_name_with_a_sign_that_no_database_takes_is_no_fault(http_on_each: httpx.Client) -> None:
    for path in ("/api/jobs/a%00b", "/api/datasets/%00", "/api/adapters/%00x"):
        assert http_on_each.get(path).status_code in (404, 422)
    body = {"dataset": "a\0b", "adapter_name": "sailor"}
    assert http_on_each.post("/api/jobs", json=body).status_code in (404, 422)
