"""The API does what its description says: requests made from it find no fault, and no answer that is not described."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given
from hypothesis import settings as limits
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from core.config import Settings
from tests.api.serving import headers, plain, served

# More by hand: HARLI_EXAMPLES=200.
EXAMPLES = int(os.environ.get("HARLI_EXAMPLES", "1"))
EDGES = 2 * EXAMPLES
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
# A stream without end, and two that measure for seconds.
LONG = ["/api/events", "/api/doctor", "/api/frontier"]
# Paths that those of a job match too, whose methods are there as well.
OF_A_JOB_TOO = ["/api/jobs/queue", "/api/jobs/compare"]


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    with served(tmp_path_factory.mktemp("described"), max_upload_mib=1) as chosen:
        yield chosen


def admission(described: Settings) -> Callable[[Any], Any]:
    """What is asked wrongly is asked by someone who is known."""
    shown = headers(described)

    def admitted(request: Any) -> Any:
        request.headers.update(shown)
        return request

    return admitted


def schema_of(described: Settings) -> Any:
    """What it says of itself, to be asked at its address."""
    with plain(described) as http:
        schema = schemathesis.openapi.from_dict(http.get("/api/openapi.json", timeout=60).json())
    schema.config.update(base_url=described.api_url)
    return schema


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_nothing_that_it_describes_makes_a_fault(described: Settings, mode: GenerationMode) -> None:
    schema = schema_of(described)
    admitted = admission(described)
    faults: list[str] = []
    answers: Counter[int] = Counter()
    tried = 0
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path in LONG:
            continue

        @limits(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode))
        def run(case: schemathesis.Case) -> None:
            response = case.call(auth=admitted)
            answers[response.status_code] += 1
            # The engine is not there.
            if response.status_code != 503 or b"engine" not in response.content:
                case.validate_response(response, checks=CHECKS)

        try:
            run()
        except Unsatisfiable:
            continue  # there is nothing that it could be asked wrongly with
        except (AssertionError, BaseExceptionGroup) as error:
            faults.append(f"{operation.label}: {_told(error)}")
        tried += 1
    assert not faults, "\n\n".join(faults)
    assert tried > 40
    assert answers[401] == 0, f"all are let in: {answers}"


def test_values_at_the_edges_of_each_description_make_no_fault(described: Settings) -> None:
    """Every parameter and field at, and just beyond, what its description permits, and methods that are not there; of
    these cases each run tries some of every route."""
    schema = schema_of(described)
    admitted = admission(described)
    faults: list[str] = []
    answers: Counter[int] = Counter()
    tried: Counter[str] = Counter()
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path in LONG or operation.label == "DELETE /api/tokens/{token_id}":
            continue
        modes = list(GenerationMode)
        cases = list(
            schema.iter_coverage_cases(operation, generation_modes=modes, generation_config=schema.config.generation)
        )
        checks = [*CHECKS, unsupported_method]
        checks += [allow_header_conformance] * (operation.path not in OF_A_JOB_TOO)
        for case in random.sample(cases, min(EDGES, len(cases))):
            response = case.call(auth=admitted)
            answers[response.status_code] += 1
            tried[operation.label] += 1
            try:
                if response.status_code != 503 or b"engine" not in response.content:
                    case.validate_response(response, checks=checks)
            except (AssertionError, BaseExceptionGroup) as error:
                faults.append(f"{operation.label}: {_told(error)}")
    assert not faults, "\n\n".join(faults)
    assert len(tried) > 100
    assert {200, 404, 405, 422} <= answers.keys()
    assert answers[401] == 0, f"all are let in: {answers}"


def test_others_are_answered_while_it_is_built_and_it_is_built_once(
    settings: Settings, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, built = threading.Event(), threading.Event(), []

    def slow(app: FastAPI) -> dict[str, Any]:
        built.append(app)
        begun.set()
        go_on.wait(20)
        return {"openapi": "3.1.0", "paths": {}, "components": {"schemas": {}}}

    monkeypatch.setattr(FastAPI, "openapi", slow)
    url = f"{settings.api_url}/api/openapi.json"
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(httpx.get, url, timeout=30, trust_env=False) for _ in range(2)]
        try:
            assert begun.wait(10)
            assert http.get("/api/me").status_code == 200
        finally:
            go_on.set()
        found = [one.result().json() for one in asked]
    assert found[0] == found[1]
    assert {"ErrorBody", "ErrorDetail", "OpenAIErrorBody"} <= found[0]["components"]["schemas"].keys()
    assert len(built) == 1


def _told(error: BaseException) -> str:
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else [error]
    return "\n".join(str(one)[:1500] for one in inner)
