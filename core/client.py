"""Typed client of the HTTP API, for notebooks, the console and the command line.

Every method returns the bodies of `core.api.schemas` and raises the `HarliError` that the API answered with. A client
is safe to share between threads and holds no state but its connections.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, Self, TypeVar, overload

import httpx
from pydantic import TypeAdapter, ValidationError

from core.api import schemas
from core.config import Settings
from core.errors import Conflict, Forbidden, HarliError, Invalid, NotFound, TooLarge, Unavailable

T = TypeVar("T")
TERMINAL = frozenset({"succeeded", "failed", "cancelled"})
Progress = Callable[[int, int], None]

_ERRORS: dict[int, type[HarliError]] = {
    error.status: error for error in (HarliError, Forbidden, NotFound, Conflict, TooLarge, Invalid, Unavailable)
}
_RECONNECT_S = 30.0
_ENDINGS = r"\.(jsonl?|csv|tsv|txt|parquet|arrow|gz|zst|zip|tar|tgz|safetensors)$"


def connect(url: str | None = None) -> Client:
    """A client of the running Harli: of `url`, or of the address that the settings name.

    Raises Unavailable, with what to do, when no API answers there.
    """
    client = Client(url or Settings().api_url)
    try:
        client.health()
    except HarliError:
        client.close()
        raise
    return client


@dataclass(frozen=True)
class ChatReply:
    """A finished answer: its text, why it ended, tokens, ms to the first text and in all."""

    text: str
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    first_ms: float | None
    total_ms: float


class ChatStream:
    """Iterates over the pieces of an answer as they come; `reply` is there once it has ended."""

    def __init__(self, pieces: Iterator[str | ChatReply]) -> None:
        self._pieces = pieces
        self.reply: ChatReply | None = None

    def __iter__(self) -> Iterator[str]:
        for piece in self._pieces:
            if isinstance(piece, ChatReply):
                self.reply = piece
            else:
                yield piece


class _Counted:
    """A file that reports how much of it has been read."""

    def __init__(self, file: BinaryIO, on_progress: Progress) -> None:
        self._file = file
        self._on_progress = on_progress
        self._total = file.seek(0, 2)
        file.seek(0)

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._on_progress(self._file.tell(), self._total)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


class Client:
    """The API at `base_url`, such as ``http://127.0.0.1:8600``. `timeout_s` bounds each request but uploads and
    streams."""

    def __init__(self, base_url: str, *, timeout_s: float = 30.0) -> None:
        self.base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._http = httpx.Client(
            base_url=self.base_url,
            timeout=timeout_s,
            limits=httpx.Limits(max_connections=100, keepalive_expiry=30),
            trust_env=False,
        )

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.base_url!r})"

    # ---- engine, telemetry, parts ------------------------------------------------------------------------------------

    def health(self) -> schemas.Health:
        """Raises Unavailable when the API does not answer."""
        return self._call("GET", "/api/health", schemas.Health)

    def engine(self) -> schemas.Engine:
        return self._call("GET", "/api/engine", schemas.Engine)

    def live(self, window_s: float = 60) -> schemas.Live:
        """The engine, the targets and the last `window_s` seconds summed up."""
        return self._call("GET", "/api/live", schemas.Live, params={"window_s": window_s})

    def telemetry(self, seconds: float = 300, points: int = 300) -> list[schemas.TelemetryPoint]:
        """The last `seconds`, oldest first, in at most `points` points."""
        params = {"seconds": seconds, "points": points}
        return self._call("GET", "/api/telemetry", list[schemas.TelemetryPoint], params=params)

    def parts(self) -> list[schemas.Part]:
        """The supervised processes; empty when Harli was not started by `harli up`."""
        return self._call("GET", "/api/parts", list[schemas.Part])

    def targets(self) -> schemas.Targets:
        return self._call("GET", "/api/targets", schemas.Targets)

    def set_targets(
        self, targets: Sequence[schemas.TargetBody | dict[str, Any]], version: int | None = None
    ) -> schemas.Targets:
        """Replace the targets. `version` is the one that was read (None: whatever is in force now); raises Conflict
        with the current targets in its message when someone has moved them since."""
        if version is None:
            version = self.targets().version
        update = _build(schemas.TargetsUpdate, {"version": version, "targets": [_plain(t) for t in targets]})
        return self._call("PUT", "/api/targets", schemas.Targets, json=update.model_dump())

    def events(self, last_id: int | None = None) -> Iterator[schemas.Event]:
        """What happens from now on (or since event `last_id`), for as long as it is iterated. A broken connection is
        taken up again where it stopped; raises Unavailable when the API stays away for half a minute."""
        away_since: float | None = None
        while True:
            headers = {} if last_id is None else {"Last-Event-ID": str(last_id)}
            timeout = httpx.Timeout(self._timeout_s, read=60)
            try:
                with self._stream("GET", "/api/events", headers=headers, timeout=timeout) as response:
                    away_since = None
                    for event_id, data in _server_sent(response.iter_lines()):
                        last_id = int(event_id) if event_id else last_id
                        yield schemas.Event.model_validate_json(data)
            except Unavailable:
                away_since = away_since or time.monotonic()
                if time.monotonic() - away_since > _RECONNECT_S:
                    raise
            except httpx.HTTPError:
                away_since = away_since or time.monotonic()
            time.sleep(0.5)

    # ---- data sets ---------------------------------------------------------------------------------------------------

    def datasets(self, limit: int = 100, cursor: str | None = None) -> schemas.Page[schemas.Dataset]:
        """Newest first; the next page has `cursor` = this page's `next`."""
        return self._page("/api/datasets", schemas.Page[schemas.Dataset], limit, cursor)

    def dataset(self, dataset: str) -> schemas.Dataset:
        """By id, or by name: its newest version."""
        return self._call("GET", f"/api/datasets/{dataset}", schemas.Dataset)

    def check_dataset_name(self, name: str) -> schemas.NameCheck:
        return self._call("GET", f"/api/names/datasets/{name}", schemas.NameCheck)

    def upload_dataset(
        self,
        source: str | Path | BinaryIO,
        name: str | None = None,
        *,
        filename: str | None = None,
        columns: dict[str, str] | None = None,
        new_version: bool = False,
        on_progress: Progress | None = None,
    ) -> schemas.Dataset:
        """Send a file (a path or an open binary file) and have it checked and stored.

        `name` defaults to the file's name without its endings. `columns` maps a role to the file's column where
        sniffing would not find it. A taken name raises Conflict before anything is sent, unless `new_version`.
        `on_progress(sent, total)` is called in bytes. A file that cannot be trained on raises Invalid, whose `report`
        says what was found.
        """
        with _opened(source, filename) as (file, label):
            params: dict[str, Any] = {"name": name or _name_of(label), "new_version": new_version}
            if columns:
                params["columns"] = json.dumps(columns)
            if not new_version:
                _require_free(self.check_dataset_name(params["name"]))
            return self._upload("/api/datasets", schemas.Dataset, params, file, label, on_progress)

    def dataset_rows(self, dataset: str, offset: int = 0, limit: int = 20) -> list[schemas.DatasetRow]:
        params = {"offset": offset, "limit": limit}
        return self._call("GET", f"/api/datasets/{dataset}/rows", list[schemas.DatasetRow], params=params)

    def dataset_packed(
        self,
        dataset: str,
        micro_batch_tokens: int | None = None,
        *,
        sequence_length: int | None = None,
        seed: int = 0,
    ) -> schemas.PackedPreview:
        """The first micro-batch exactly as a job with these settings trains on it; needs the served model's
        tokenizer."""
        params = {"micro_batch_tokens": micro_batch_tokens, "sequence_length": sequence_length, "seed": seed}
        return self._call("GET", f"/api/datasets/{dataset}/packed", schemas.PackedPreview, params=_given(params))

    def download_dataset(self, dataset: str, destination: str | Path) -> Path:
        """Write the normalised Parquet to `destination` (a file, or a folder to put it in)."""
        return self._download(f"/api/datasets/{dataset}/download", Path(destination))

    def delete_dataset(self, dataset: str) -> None:
        """By id: that version; by name: all of them. Raises Conflict, naming the job, while one needs it."""
        self._call("DELETE", f"/api/datasets/{dataset}", None)

    # ---- jobs --------------------------------------------------------------------------------------------------------

    def submit_job(
        self, job: schemas.JobCreate | None = None, *, idempotency_key: str | None = None, **fields: Any
    ) -> schemas.Job:
        """Submit a `JobCreate`, or its fields: ``submit_job(dataset="support", adapter_name="support-bot")``.

        With the same `idempotency_key` (up to a day) a second press answers with the first one's job.
        """
        body = job if job is not None else _build(schemas.JobCreate, fields)
        headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
        return self._call(
            "POST", "/api/jobs", schemas.Job, json=body.model_dump(mode="json", exclude_unset=True), headers=headers
        )

    def jobs(
        self, state: schemas.JobState | None = None, limit: int = 100, cursor: str | None = None
    ) -> schemas.Page[schemas.Job]:
        """Newest first, of one state or all; the next page has `cursor` = this page's `next`."""
        return self._page("/api/jobs", schemas.Page[schemas.Job], limit, cursor, state=state)

    def job(self, job_id: str) -> schemas.Job:
        return self._call("GET", f"/api/jobs/{job_id}", schemas.Job)

    def job_events(self, job_id: str, after: int = 0, limit: int = 1000) -> list[schemas.JobEvent]:
        """Oldest first, those with an id above `after`."""
        params = {"after": after, "limit": limit}
        return self._call("GET", f"/api/jobs/{job_id}/events", list[schemas.JobEvent], params=params)

    def job_metrics(self, job_id: str, after: int = -1, limit: int = 10_000) -> list[schemas.JobMetric]:
        """In order of steps, those of steps above `after`."""
        params = {"after": after, "limit": limit}
        return self._call("GET", f"/api/jobs/{job_id}/metrics", list[schemas.JobMetric], params=params)

    def job_log(self, job_id: str, after: int = 0, limit: int = 1000) -> list[schemas.JobLogLine]:
        """Oldest first, those with an id above `after`."""
        params = {"after": after, "limit": limit}
        return self._call("GET", f"/api/jobs/{job_id}/log", list[schemas.JobLogLine], params=params)

    def pause_job(self, job_id: str) -> schemas.Job:
        return self._call("POST", f"/api/jobs/{job_id}/pause", schemas.Job)

    def resume_job(self, job_id: str) -> schemas.Job:
        """Put a paused or interrupted job back in the queue; it goes on from its newest checkpoint."""
        return self._call("POST", f"/api/jobs/{job_id}/resume", schemas.Job)

    def stop_job(self, job_id: str, save: bool = False) -> schemas.Job:
        """End a job; with `save` the adapter is stored as it stands now."""
        return self._call("POST", f"/api/jobs/{job_id}/stop", schemas.Job, json={"save": save})

    def update_job(self, job_id: str, *, priority: int | None = None, name: str | None = None) -> schemas.Job:
        """Change what is given and not None."""
        body = _build(schemas.JobPatch, _given({"priority": priority, "name": name}))
        return self._call("PATCH", f"/api/jobs/{job_id}", schemas.Job, json=body.model_dump(exclude_unset=True))

    def wait(
        self,
        job_id: str,
        on_update: Callable[[schemas.Job], None] | None = None,
        *,
        timeout_s: float | None = None,
        poll_s: float = 1.0,
    ) -> schemas.Job:
        """Wait until the job has succeeded, failed or been cancelled, and return it.

        `on_update` gets the job whenever it has changed. An interrupt (Ctrl-C, the notebook's stop button) ends the
        waiting and leaves the job alone. Raises TimeoutError after `timeout_s`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        seen: schemas.Job | None = None
        while True:
            job = self.job(job_id)
            if on_update is not None and job != seen:
                on_update(job)
            seen = job
            if job.state in TERMINAL:
                return job
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"job {job_id} is {job.state} at step {job.step} after {timeout_s} s")
            time.sleep(poll_s)

    # ---- adapters ----------------------------------------------------------------------------------------------------

    def adapters(self, limit: int = 100, cursor: str | None = None) -> schemas.Page[schemas.Adapter]:
        """By name; the next page has `cursor` = this page's `next`."""
        return self._page("/api/adapters", schemas.Page[schemas.Adapter], limit, cursor)

    def adapter(self, name: str) -> schemas.Adapter:
        return self._call("GET", f"/api/adapters/{name}", schemas.Adapter)

    def check_adapter_name(self, name: str) -> schemas.NameCheck:
        return self._call("GET", f"/api/names/adapters/{name}", schemas.NameCheck)

    def upload_adapter(
        self,
        source: str | Path | BinaryIO,
        name: str | None = None,
        *,
        filename: str | None = None,
        new_version: bool = False,
        on_progress: Progress | None = None,
    ) -> schemas.Adapter:
        """Send a peft adapter: its folder (the files in it, not its subfolders), a zip or a tar of it, by path or as
        an open file. A taken name raises Conflict before anything is sent, unless `new_version`."""
        with _opened(source, filename, zip_folders=True) as (file, label):
            params = {"name": name or _name_of(label), "new_version": new_version}
            if not new_version:
                _require_free(self.check_adapter_name(str(params["name"])))
            return self._upload("/api/adapters", schemas.Adapter, params, file, label, on_progress)

    def deploy_adapter(self, name: str, version: int | None = None) -> schemas.Adapter:
        """Ask the engine to serve `version` (None: the newest) under `name`; see `deployment` for how it goes."""
        return self._call("POST", f"/api/adapters/{name}/deploy", schemas.Adapter, json={"version": version})

    def undeploy_adapter(self, name: str) -> schemas.Adapter:
        return self._call("POST", f"/api/adapters/{name}/undeploy", schemas.Adapter)

    def download_adapter(self, name: str, destination: str | Path, version: int | None = None) -> Path:
        """Write a zip of the peft folder to `destination` (a file, or a folder to put it in)."""
        params = _given({"version": version})
        return self._download(f"/api/adapters/{name}/download", Path(destination), params)

    def delete_adapter(self, name: str, version: int | None = None) -> None:
        """Undeploy and delete one version, or (None) all. Raises Conflict, naming the job, while one needs it."""
        self._call("DELETE", f"/api/adapters/{name}", None, params=_given({"version": version}))

    # ---- the engine's own endpoint -----------------------------------------------------------------------------------

    @overload
    def chat(
        self,
        messages: str | Sequence[schemas.Message | dict[str, Any]],
        model: str | None = None,
        *,
        stream: Literal[True] = True,
        **sampling: Any,
    ) -> ChatStream: ...

    @overload
    def chat(
        self,
        messages: str | Sequence[schemas.Message | dict[str, Any]],
        model: str | None = None,
        *,
        stream: Literal[False],
        **sampling: Any,
    ) -> ChatReply: ...

    def chat(
        self,
        messages: str | Sequence[schemas.Message | dict[str, Any]],
        model: str | None = None,
        *,
        stream: bool = True,
        **sampling: Any,
    ) -> ChatStream | ChatReply:
        """Chat with the served model, or with the deployed adapter that `model` names, at the engine's OpenAI endpoint.

        `messages` is the conversation, or one user message as text; `sampling` goes into the request as it is
        (``max_tokens``, ``temperature`` ...). Raises Unavailable when no engine serves, the engine's own refusal as
        Invalid. A stream ends the generation when it is left early.
        """
        engine = self.engine()
        if engine.state != "ready" or engine.http_url is None:
            raise Unavailable(
                "engine_unavailable", f"the engine is {engine.state}; see `harli doctor` and the Overview page", "model"
            )
        turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else [_plain(m) for m in messages]
        served = engine.model or "default"
        body = {
            **sampling,
            # The engine addresses an adapter as base:adapter.
            "model": served if model in (None, served) else f"{served}:{model}",
            "messages": turns,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        pieces = ChatStream(self._chat_pieces(f"{engine.http_url}/v1/chat/completions", body))
        if stream:
            return pieces
        for _ in pieces:
            pass
        assert pieces.reply is not None, "a chat stream ends with its reply"
        return pieces.reply

    def _chat_pieces(self, url: str, body: dict[str, Any]) -> Iterator[str | ChatReply]:
        start = time.perf_counter()
        first_ms: float | None = None
        finish_reason: str | None = None
        usage: dict[str, Any] = {}
        text: list[str] = []
        timeout = httpx.Timeout(self._timeout_s, read=300)
        try:
            with self._http.stream("POST", url, json=body, timeout=timeout) as response:
                if response.status_code >= 400:
                    response.read()
                    raise _engine_error(response)
                for _, data in _server_sent(response.iter_lines()):
                    if data == "[DONE]":
                        break
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise Invalid("engine_refused", f"the engine answered: {_engine_text(chunk)}", "model")
                    usage = chunk.get("usage") or usage
                    for choice in chunk.get("choices") or []:
                        finish_reason = choice.get("finish_reason") or finish_reason
                        piece = (choice.get("delta") or {}).get("content")
                        if piece:
                            first_ms = first_ms or (time.perf_counter() - start) * 1e3
                            text.append(piece)
                            yield piece
        except httpx.HTTPError as error:
            raise Unavailable(
                "engine_unreachable", f"the engine at {url} broke off: {_reason(error)}; try again when it is back"
            ) from error
        yield ChatReply(
            text="".join(text),
            finish_reason=finish_reason,
            prompt_tokens=usage.get("prompt_tokens"),
            completion_tokens=usage.get("completion_tokens"),
            first_ms=first_ms,
            total_ms=(time.perf_counter() - start) * 1e3,
        )

    # ---- transport ---------------------------------------------------------------------------------------------------

    @overload
    def _call(self, method: str, path: str, answer: type[T], **request: Any) -> T: ...

    @overload
    def _call(self, method: str, path: str, answer: None, **request: Any) -> None: ...

    def _call(self, method: str, path: str, answer: type[T] | None, **request: Any) -> T | None:
        try:
            response = self._http.request(method, path, **request)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        _raise_for(response)
        return None if answer is None else TypeAdapter(answer).validate_json(response.content)

    def _page(self, path: str, answer: type[T], limit: int, cursor: str | None, **filters: Any) -> T:
        return self._call("GET", path, answer, params=_given({"limit": limit, "cursor": cursor, **filters}))

    def _upload(
        self,
        path: str,
        answer: type[T],
        params: dict[str, Any],
        file: BinaryIO,
        label: str,
        on_progress: Progress | None,
    ) -> T:
        size = file.seek(0, 2)
        file.seek(0)
        limit = self.health().max_upload_bytes
        if size > limit:
            raise TooLarge(
                "upload_too_large",
                f"{label} has {size} bytes and this Harli takes {limit}; raise HARLI_MAX_UPLOAD_MIB or split the file",
                "file",
            )
        body = _Counted(file, on_progress) if on_progress is not None else file
        # The answer comes when the file has been checked, which takes as long as the file is long.
        timeout = httpx.Timeout(self._timeout_s, read=3600)
        return self._call("POST", path, answer, params=params, files={"file": (label, body)}, timeout=timeout)

    def _download(self, path: str, destination: Path, params: dict[str, Any] | None = None) -> Path:
        with self._stream("GET", path, params=params) as response:
            if destination.is_dir():
                named = re.search(r'filename="([^"/\\]+)"', response.headers.get("content-disposition", ""))
                destination = destination / (named.group(1) if named else path.split("/")[-2])
            part = destination.with_name(destination.name + ".part")
            try:
                with part.open("wb") as file:
                    for chunk in response.iter_bytes():
                        file.write(chunk)
                part.replace(destination)
            except httpx.HTTPError as error:
                raise self._unreachable(error) from error
            finally:
                part.unlink(missing_ok=True)
        return destination

    @contextmanager
    def _stream(self, method: str, path: str, **request: Any) -> Iterator[httpx.Response]:
        try:
            response = self._http.send(self._http.build_request(method, path, **request), stream=True)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        try:
            if response.status_code >= 400:
                response.read()
            _raise_for(response)
            yield response
        finally:
            response.close()

    def _unreachable(self, error: httpx.HTTPError) -> Unavailable:
        return Unavailable(
            "api_unreachable",
            f"Harli's API does not answer at {self.base_url}: {_reason(error)}; start it with `harli up`, or give the "
            "address of a running one (HARLI_HOST, HARLI_API_PORT)",
            "base_url",
        )


# ---- helpers ---------------------------------------------------------------------------------------------------------


def _raise_for(response: httpx.Response) -> None:
    """Raise the HarliError that an error response stands for."""
    if response.status_code < 400:
        return
    try:
        body = schemas.ErrorBody.model_validate_json(response.content)
    except ValidationError:
        message = f"{response.url} answered {response.status_code}, not as Harli's API does: {response.text[:200]}"
        body = schemas.ErrorBody(error=schemas.ErrorDetail(code="not_harli", message=message))
    detail = body.error
    error = _ERRORS.get(response.status_code, HarliError)(detail.code, detail.message, detail.param)
    error.status = response.status_code
    if isinstance(error, Invalid):
        error.report = body.report
    raise error


def _engine_error(response: httpx.Response) -> HarliError:
    try:
        text = _engine_text(response.json())
    except ValueError:
        text = response.text[:300]
    kind = Invalid if response.status_code < 500 else Unavailable
    return kind("engine_refused", f"the engine answered {response.status_code}: {text}", "model")


def _engine_text(body: Any) -> str:
    """OpenAI's error body is {"error": {"message"}}, SGLang's own has the message at the top."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _reason(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__


def _server_sent(lines: Iterator[str]) -> Iterator[tuple[str, str]]:
    """(id, data) of each server-sent event that has data."""
    event_id, data = "", list[str]()
    for line in lines:
        if not line:
            if data:
                yield event_id, "\n".join(data)
            data = []
        elif line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif line.startswith("id:"):
            event_id = line[3:].strip()


@contextmanager
def _opened(
    source: str | Path | BinaryIO, filename: str | None, *, zip_folders: bool = False
) -> Iterator[tuple[BinaryIO, str]]:
    """The open file and the name it goes by; a folder (where that is allowed) as a zip of its files."""
    if not isinstance(source, str | Path):
        yield source, filename or Path(str(getattr(source, "name", "upload"))).name
        return
    path = Path(source).expanduser()
    if not path.exists():
        raise NotFound("file_not_found", f"there is no file {path}; check the path", "source")
    if not path.is_dir():
        with path.open("rb") as file:
            yield file, filename or path.name
        return
    if not zip_folders:
        raise Invalid("not_a_file", f"{path} is a folder; give the file itself", "source")
    with tempfile.TemporaryFile() as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for member in sorted(path.iterdir()):
                if member.is_file():
                    archive.write(member, member.name)
        yield file, f"{filename or path.resolve().name}.zip"


def _name_of(label: str) -> str:
    """A name that the API takes, from a file's: its stem in lower case, other signs as dashes."""
    stem = Path(label).name
    while (shorter := re.sub(_ENDINGS, "", stem)) != stem:
        stem = shorter
    name = re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-._")[:63]
    if not name:
        raise Invalid("name_missing", f"no name can be made of the file name {label!r}; give one", "name")
    return name


def _require_free(check: schemas.NameCheck) -> None:
    if not check.available:
        raise Conflict("name_taken", check.reason or f"the name {check.name} is taken; give another", "name")


def _build(model: type[T], fields: dict[str, Any]) -> T:
    """A request body; a fault in it is raised as the Invalid that the API would answer with."""
    try:
        return model(**fields)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in fault["loc"]) or model.__name__
        raise Invalid("invalid_request", f"{place}: {fault['msg']} (got {fault['input']!r})", place) from error


def _plain(value: Any) -> Any:
    return value.model_dump() if hasattr(value, "model_dump") else value


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
