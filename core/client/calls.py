"""The calls of the API, each once; `Client` and `AsyncClient` have them as methods."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from core.api import schemas
from core.api import tenant_schemas as tenancy
from core.api.names import name_of
from core.client.files import Counted, Progress, opened
from core.client.intake_calls import IntakeCalls
from core.client.job_calls import JobCalls
from core.client.rows import Rows
from core.client.steps import Steps, ask, ask_rows, call, download, exchange, plain
from core.errors import Conflict, HarliError, Invalid, TooLarge

T = TypeVar("T")
M = TypeVar("M")
B = TypeVar("B", bound=BaseModel)
TERMINAL = frozenset({"succeeded", "failed", "cancelled"})
# Proxies give up on an answer that does not begin within a minute, and a large file's check takes longer.
_PATIENCE_S = 20
# For the answer to an upload: a proxy may pass the file on only once it has all of it.
_ANSWER_S = 600


class Calls(JobCalls, IntakeCalls):
    """What both clients can do. A call that needs another one describes it by ``yield from Calls.other(self, ...)``."""

    # ---- engine, telemetry, parts ------------------------------------------------------------------------------------

    @call
    def health(self) -> Steps[schemas.Health]:
        """Raises Unavailable when the API does not answer."""
        return ask(schemas.Health, "GET", "/api/health")

    @call
    def engine(self) -> Steps[schemas.Engine]:
        return ask(schemas.Engine, "GET", "/api/engine")

    @call
    def wait_for_engine(self, timeout_s: float = 600, *, poll_s: float = 0.5) -> Steps[schemas.Engine]:
        """The engine once it serves. Raises TimeoutError when it does not in time."""
        deadline = time.monotonic() + timeout_s
        pause_s = 0.0
        while (found := (yield from ask(schemas.Engine, "GET", "/api/engine", after_s=pause_s))).state != "ready":
            if time.monotonic() >= deadline:
                raise TimeoutError(f"the engine is {found.state} after {timeout_s:g} s; see `harli logs engine`")
            pause_s = poll_s
        return found

    @call
    def live(self, window_s: float = 60) -> Steps[schemas.Live]:
        """The engine, the targets and the last `window_s` seconds summed up."""
        return ask(schemas.Live, "GET", "/api/live", params={"window_s": window_s})

    @call
    def telemetry(self, seconds: float = 300, points: int = 300) -> Steps[Rows[schemas.TelemetryPoint]]:
        """The last `seconds`, oldest first, in at most `points` points."""
        params = {"seconds": seconds, "points": points}
        return ask_rows(schemas.TelemetryPoint, "/api/telemetry", params=params)

    @call
    def parts(self) -> Steps[Rows[schemas.Part]]:
        """The supervised processes; empty when Harli was not started by `harli up`."""
        return ask_rows(schemas.Part, "/api/parts")

    @call
    def targets(self) -> Steps[schemas.Targets]:
        return ask(schemas.Targets, "GET", "/api/targets")

    @call
    def set_targets(
        self, targets: Sequence[schemas.TargetBody | dict[str, Any]], version: int | None = None
    ) -> Steps[schemas.Targets]:
        """Replace the targets. `version` is the one that was read (None: whatever is in force now); raises Conflict
        with the current targets in its message when someone has moved them since."""
        if version is None:
            version = (yield from Calls.targets(self)).version
        update = build(schemas.TargetsUpdate, {"version": version, "targets": [plain(t) for t in targets]})
        return (yield from ask(schemas.Targets, "PUT", "/api/targets", json=update.model_dump()))

    @call
    def frontier(self) -> Steps[schemas.Frontier]:
        """What each ITL target would give finetuning at the present load; the first answer takes seconds."""
        return ask(schemas.Frontier, "GET", "/api/frontier", read_timeout_s=150)

    @call
    def notices(
        self, codes: Sequence[str] = (), limit: int = 100, cursor: str | None = None
    ) -> Steps[schemas.Page[schemas.Notice]]:
        """What the engine had to tell, newest first, of some codes (``guard``, ``targets`` ...) or all."""
        return ask_page(schemas.Notice, "/api/notices", limit, cursor, code=list(codes) or None)

    @call
    def settings(self) -> Steps[dict[str, str]]:
        """Those of the API process, by name, without what is secret."""
        return ask(dict[str, str], "GET", "/api/settings")

    @call
    def doctor(self) -> Steps[schemas.Doctor]:
        """What the machine of the API has and lacks; takes some seconds."""
        return ask(schemas.Doctor, "GET", "/api/doctor", read_timeout_s=150)

    @call
    def alerts(
        self, state: str | None = None, limit: int = 100, cursor: str | None = None
    ) -> Steps[schemas.Page[schemas.Alert]]:
        """Newest first, of one state (pending, firing, resolved) or all."""
        return ask_page(schemas.Alert, "/api/alerts", limit, cursor, state=state)

    @call
    def alert_rules(self) -> Steps[Rows[schemas.AlertRule]]:
        return ask_rows(schemas.AlertRule, "/api/alerts/rules")

    @call
    def set_alert_rule(
        self, /, name: str, rule: schemas.AlertRuleBody | None = None, **fields: Any
    ) -> Steps[schemas.AlertRule]:
        """Make a rule or replace the one of that name, by an `AlertRuleBody` or its fields."""
        body = rule if rule is not None else build(schemas.AlertRuleBody, fields)
        return ask(schemas.AlertRule, "PUT", f"/api/alerts/rules/{name}", json=body.model_dump(exclude_unset=True))

    @call
    def delete_alert_rule(self, name: str) -> Steps[None]:
        yield from exchange("DELETE", f"/api/alerts/rules/{name}")

    # ---- data sets ---------------------------------------------------------------------------------------------------

    @call
    def datasets(self, limit: int = 100, cursor: str | None = None) -> Steps[schemas.Page[schemas.Dataset]]:
        """Newest first; the next page has `cursor` = this page's `next`."""
        return ask_page(schemas.Dataset, "/api/datasets", limit, cursor)

    @call
    def dataset(self, dataset: str) -> Steps[schemas.Dataset]:
        """By id, or by name: its newest version."""
        return ask(schemas.Dataset, "GET", f"/api/datasets/{dataset}")

    @call
    def check_dataset_name(self, name: str) -> Steps[schemas.NameCheck]:
        return ask(schemas.NameCheck, "GET", f"/api/names/datasets/{name}")

    @call
    def upload_dataset(
        self,
        source: str | Path | BinaryIO,
        name: str | None = None,
        *,
        filename: str | None = None,
        columns: dict[str, str] | None = None,
        new_version: bool = False,
        operation: str | None = None,
        on_progress: Progress | None = None,
    ) -> Steps[schemas.Dataset]:
        """Send a file (a path or an open binary file) and have it checked and stored.

        `name` defaults to the file's name without its endings. `columns` maps a role to the file's column where
        sniffing would not find it. A taken name raises Conflict before anything is sent, unless `new_version`.
        `on_progress(sent, total)` is called in bytes. A file that cannot be trained on raises Invalid, whose `report`
        says what was found. Rows that a version of the name has already come back as that version. `operation` is an id
        of 8 to 64 letters and digits of your making, under which another thread can watch and cancel the check; so does
        whatever ends the waiting for it, an interrupt for one.
        """
        with opened(source, filename) as (file, label):
            params: dict[str, Any] = {"name": name or name_of(label), "new_version": new_version}
            if columns:
                params["columns"] = json.dumps(columns)
            if operation is not None:
                params["operation"] = operation
            if not new_version:
                _require_free((yield from Calls.check_dataset_name(self, params["name"])))
            params["wait_s"] = _PATIENCE_S
            response = yield from _upload("/api/datasets", params, file, label, on_progress)
        if response.status_code != 202:
            return schemas.Dataset.model_validate_json(response.content)
        begun = schemas.Operation.model_validate_json(response.content)
        try:
            ended = yield from Calls.wait_operation(self, begun.id)
        except (HarliError, GeneratorExit):
            raise
        except BaseException:
            yield from Calls.cancel_operation(self, begun.id)
            raise
        return (yield from Calls.dataset(self, str(ended.result)))

    @call
    def dataset_rows(self, dataset: str, offset: int = 0, limit: int = 20) -> Steps[Rows[schemas.DatasetRow]]:
        params = {"offset": offset, "limit": limit}
        return ask_rows(schemas.DatasetRow, f"/api/datasets/{dataset}/rows", params=params)

    @call
    def dataset_packed(
        self,
        dataset: str,
        micro_batch_tokens: int | None = None,
        *,
        sequence_length: int | None = None,
        seed: int = 0,
    ) -> Steps[schemas.PackedPreview]:
        """The first micro-batch exactly as a job with these settings trains on it; needs the served model's
        tokenizer."""
        params = {"micro_batch_tokens": micro_batch_tokens, "sequence_length": sequence_length, "seed": seed}
        return ask(schemas.PackedPreview, "GET", f"/api/datasets/{dataset}/packed", params=given(params))

    @call
    def download_dataset(self, dataset: str, destination: str | Path) -> Steps[Path]:
        """Write the normalised Parquet to `destination` (a file, or a folder to put it in)."""
        return download(f"/api/datasets/{dataset}/download", Path(destination))

    @call
    def delete_dataset(self, dataset: str) -> Steps[None]:
        """By id: that version; by name: all of them. Raises Conflict, naming the job, while one needs it."""
        yield from exchange("DELETE", f"/api/datasets/{dataset}")

    # ---- jobs --------------------------------------------------------------------------------------------------------

    @call
    def submit_job(
        self, /, job: schemas.JobCreate | None = None, *, idempotency_key: str | None = None, **fields: Any
    ) -> Steps[schemas.Job]:
        """Submit a `JobCreate`, or its fields: ``submit_job(dataset="support", adapter_name="support-bot")``.

        With the same `idempotency_key` (up to a day) a second press answers with the first one's job.
        """
        body = job if job is not None else build(schemas.JobCreate, fields)
        headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
        return ask(
            schemas.Job, "POST", "/api/jobs", json=body.model_dump(mode="json", exclude_unset=True), headers=headers
        )

    @call
    def jobs(
        self, state: schemas.JobState | None = None, limit: int = 100, cursor: str | None = None
    ) -> Steps[schemas.Page[schemas.Job]]:
        """Newest first, of one state or all; the next page has `cursor` = this page's `next`."""
        return ask_page(schemas.Job, "/api/jobs", limit, cursor, state=state)

    @call
    def job(self, job_id: str) -> Steps[schemas.Job]:
        return ask(schemas.Job, "GET", f"/api/jobs/{job_id}")

    @call
    def job_events(self, job_id: str, after: int = 0, limit: int = 1000) -> Steps[Rows[schemas.JobEvent]]:
        """Oldest first, those with an id above `after`."""
        params = {"after": after, "limit": limit}
        return ask_rows(schemas.JobEvent, f"/api/jobs/{job_id}/events", params=params)

    @call
    def job_metrics(self, job_id: str, after: int = -1, limit: int = 10_000) -> Steps[Rows[schemas.JobMetric]]:
        """In order of steps, those of steps above `after`."""
        params = {"after": after, "limit": limit}
        return ask_rows(schemas.JobMetric, f"/api/jobs/{job_id}/metrics", params=params)

    @call
    def job_log(self, job_id: str, after: int = 0, limit: int = 1000) -> Steps[Rows[schemas.JobLogLine]]:
        """Oldest first, those with an id above `after`."""
        params = {"after": after, "limit": limit}
        return ask_rows(schemas.JobLogLine, f"/api/jobs/{job_id}/log", params=params)

    @call
    def pause_job(self, job_id: str) -> Steps[schemas.Job]:
        return ask(schemas.Job, "POST", f"/api/jobs/{job_id}/pause")

    @call
    def resume_job(self, job_id: str) -> Steps[schemas.Job]:
        """Put a paused or interrupted job back in the queue; it goes on from its newest checkpoint."""
        return ask(schemas.Job, "POST", f"/api/jobs/{job_id}/resume")

    @call
    def stop_job(self, job_id: str, save: bool = False) -> Steps[schemas.Job]:
        """End a job; with `save` the adapter is stored as it stands now."""
        return ask(schemas.Job, "POST", f"/api/jobs/{job_id}/stop", json={"save": save})

    @call
    def update_job(self, job_id: str, *, priority: int | None = None, name: str | None = None) -> Steps[schemas.Job]:
        """Change what is given and not None."""
        body = build(schemas.JobPatch, given({"priority": priority, "name": name}))
        return ask(schemas.Job, "PATCH", f"/api/jobs/{job_id}", json=body.model_dump(exclude_unset=True))

    @call
    def wait(
        self,
        job_id: str,
        on_update: Callable[[schemas.Job], None] | None = None,
        *,
        timeout_s: float | None = None,
        poll_s: float = 1.0,
    ) -> Steps[schemas.Job]:
        """Wait until the job has succeeded, failed or been cancelled, and return it.

        `on_update` gets the job whenever it has changed. An interrupt (Ctrl-C, the notebook's stop button) ends the
        waiting and leaves the job alone. Raises TimeoutError after `timeout_s`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        seen: schemas.Job | None = None
        pause_s = 0.0
        while True:
            job = yield from ask(schemas.Job, "GET", f"/api/jobs/{job_id}", after_s=pause_s)
            if on_update is not None and job != seen:
                on_update(job)
            seen = job
            if job.state in TERMINAL:
                return job
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"job {job_id} is {job.state} at step {job.step} after {timeout_s} s")
            pause_s = poll_s

    # ---- adapters ----------------------------------------------------------------------------------------------------

    @call
    def adapters(self, limit: int = 100, cursor: str | None = None) -> Steps[schemas.Page[schemas.Adapter]]:
        """By name; the next page has `cursor` = this page's `next`."""
        return ask_page(schemas.Adapter, "/api/adapters", limit, cursor)

    @call
    def adapter(self, name: str) -> Steps[schemas.Adapter]:
        return ask(schemas.Adapter, "GET", f"/api/adapters/{name}")

    @call
    def check_adapter_name(self, name: str) -> Steps[schemas.NameCheck]:
        return ask(schemas.NameCheck, "GET", f"/api/names/adapters/{name}")

    @call
    def upload_adapter(
        self,
        source: str | Path | BinaryIO,
        name: str | None = None,
        *,
        filename: str | None = None,
        new_version: bool = False,
        on_progress: Progress | None = None,
    ) -> Steps[schemas.Adapter]:
        """Send a peft adapter: its folder (the files in it, not its subfolders), a zip or a tar of it, by path or as
        an open file, or the path of its safetensors file with adapter_config.json beside it. A taken name raises
        Conflict before anything is sent, unless `new_version`."""
        with opened(source, filename, zip_folders=True) as (file, label):
            params = {"name": name or name_of(label), "new_version": new_version}
            if not new_version:
                _require_free((yield from Calls.check_adapter_name(self, str(params["name"]))))
            response = yield from _upload("/api/adapters", params, file, label, on_progress)
        return schemas.Adapter.model_validate_json(response.content)

    @call
    def deploy_adapter(self, name: str, version: int | None = None) -> Steps[schemas.Adapter]:
        """Ask the engine to serve `version` (None: the newest) under `name`; see `deployment` for how it goes."""
        return ask(schemas.Adapter, "POST", f"/api/adapters/{name}/deploy", json={"version": version})

    @call
    def wait_for_adapter(self, name: str, *, timeout_s: float = 120, poll_s: float = 0.2) -> Steps[schemas.Adapter]:
        """The adapter once the engine serves the version that is wanted of it. Raises Conflict when that is none or
        cannot be served, TimeoutError when it takes longer."""
        deadline = time.monotonic() + timeout_s
        pause_s = 0.0
        while True:
            found = yield from ask(schemas.Adapter, "GET", f"/api/adapters/{name}", after_s=pause_s)
            if found.deployment == "deployed" and found.deployed_version == found.wanted_version:
                return found
            if found.error is not None:
                raise Conflict(found.error.code, f"adapter {name}: {found.error.message}", found.error.param)
            if found.wanted_version is None:
                raise Conflict("not_wanted", f"adapter {name} is not to be served; deploy it first", "name")
            if time.monotonic() >= deadline:
                raise TimeoutError(f"adapter {name} is {found.deployment} after {timeout_s:g} s")
            pause_s = poll_s

    @call
    def undeploy_adapter(self, name: str) -> Steps[schemas.Adapter]:
        return ask(schemas.Adapter, "POST", f"/api/adapters/{name}/undeploy")

    @call
    def download_adapter(self, name: str, destination: str | Path, version: int | None = None) -> Steps[Path]:
        """Write a zip of the peft folder to `destination` (a file, or a folder to put it in)."""
        params = given({"version": version})
        return download(f"/api/adapters/{name}/download", Path(destination), params)

    @call
    def delete_adapter(self, name: str, version: int | None = None) -> Steps[None]:
        """Undeploy and delete one version, or (None) all. Raises Conflict, naming the job, while one needs it."""
        yield from exchange("DELETE", f"/api/adapters/{name}", params=given({"version": version}))

    # ---- tenants, users, tokens, the audit log -----------------------------------------------------------------------

    @call
    def me(self) -> Steps[tenancy.Me]:
        """Whom this client's token stands for."""
        return ask(tenancy.Me, "GET", "/api/me")

    @call
    def tenants(self) -> Steps[Rows[tenancy.Tenant]]:
        return ask_rows(tenancy.Tenant, "/api/tenants")

    @call
    def create_tenant(self, name: str) -> Steps[tenancy.Tenant]:
        body = build(tenancy.TenantCreate, {"name": name})
        return ask(tenancy.Tenant, "POST", "/api/tenants", json=body.model_dump())

    @call
    def suspend_tenant(self, name: str, suspended: bool = True) -> Steps[tenancy.Tenant]:
        """Have a tenant's tokens refused, or (False) taken again."""
        return ask(tenancy.Tenant, "PATCH", f"/api/tenants/{name}", json={"suspended": suspended})

    @call
    def users(self, tenant: str | None = None) -> Steps[Rows[tenancy.User]]:
        return ask_rows(tenancy.User, "/api/users", params=given({"tenant": tenant}))

    @call
    def create_user(self, name: str, role: tenancy.Role = "operator", tenant: str | None = None) -> Steps[tenancy.User]:
        """Of your own tenant, unless one is named."""
        body = build(tenancy.UserCreate, {"name": name, "role": role, "tenant": tenant})
        return ask(tenancy.User, "POST", "/api/users", json=body.model_dump())

    @call
    def update_user(
        self, user_id: str, *, role: tenancy.Role | None = None, disabled: bool | None = None
    ) -> Steps[tenancy.User]:
        """Change what is given and not None."""
        body = build(tenancy.UserPatch, given({"role": role, "disabled": disabled}))
        return ask(tenancy.User, "PATCH", f"/api/users/{user_id}", json=body.model_dump(exclude_unset=True))

    @call
    def tokens(self, tenant: str | None = None) -> Steps[Rows[tenancy.Token]]:
        """Newest first, the revoked ones too."""
        return ask_rows(tenancy.Token, "/api/tokens", params=given({"tenant": tenant}))

    @call
    def create_token(
        self,
        name: str,
        user: str | None = None,
        *,
        scopes: Sequence[str] | None = None,
        expires_in_days: float | None = None,
    ) -> Steps[tenancy.TokenMade]:
        """A token for a user's id, or (None) for yourself. Keep `token` of the answer: it is not shown again."""
        fields = {"name": name, "user": user, "scopes": scopes, "expires_in_days": expires_in_days}
        return ask(tenancy.TokenMade, "POST", "/api/tokens", json=build(tenancy.TokenCreate, fields).model_dump())

    @call
    def revoke_token(self, token_id: str) -> Steps[tenancy.Token]:
        return ask(tenancy.Token, "DELETE", f"/api/tokens/{token_id}")

    @call
    def audit(
        self,
        limit: int = 100,
        cursor: str | None = None,
        *,
        user: str | None = None,
        tenant: str | None = None,
        outcome: str | None = None,
        text: str | None = None,
        since: datetime | None = None,
    ) -> Steps[schemas.Page[tenancy.AuditEntry]]:
        """Who changed what, newest first; `text` is looked for in action and ref."""
        moment = since.isoformat() if since is not None else None
        filters = {"user": user, "tenant": tenant, "outcome": outcome, "text": text, "since": moment}
        return ask_page(tenancy.AuditEntry, "/api/audit", limit, cursor, **filters)


# ---- parts of calls --------------------------------------------------------------------------------------------------


def ask_page(row: type[M], path: str, limit: int, cursor: str | None, **filters: Any) -> Steps[schemas.Page[M]]:
    params = given({"limit": limit, "cursor": cursor, **filters})
    return ask(schemas.Page[row], "GET", path, params=params)  # type: ignore[valid-type]


def _upload(
    path: str, params: dict[str, Any], file: BinaryIO, label: str, on_progress: Progress | None
) -> Steps[httpx.Response]:
    size = file.seek(0, 2)
    file.seek(0)
    limit = (yield from ask(schemas.Health, "GET", "/api/health")).max_upload_bytes
    if size > limit:
        raise TooLarge(
            "upload_too_large",
            f"{label} has {size} bytes and this Harli takes {limit}; raise HARLI_MAX_UPLOAD_MIB or split the file",
            "file",
        )
    body = Counted(file, on_progress) if on_progress is not None else file
    return (yield from exchange("POST", path, params=params, files={"file": (label, body)}, read_timeout_s=_ANSWER_S))


def _require_free(check: schemas.NameCheck) -> None:
    if not check.available:
        raise Conflict("name_taken", check.reason or f"the name {check.name} is taken; give another", "name")


def build(model: type[B], fields: dict[str, Any]) -> B:
    """A request body; a fault in it is raised as the Invalid that the API would answer with. What Python has beside
    JSON's types, such as tuples, is taken."""
    try:
        return model.model_validate(fields, strict=False)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in fault["loc"]) or model.__name__
        raise Invalid("invalid_request", f"{place}: {fault['msg']} (got {fault['input']!r})", place) from error


def given(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
