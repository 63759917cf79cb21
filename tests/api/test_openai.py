"""OpenAI's own client, unchanged, against Harli."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import openai
import pytest
from openai import OpenAI
from starlette.testclient import TestClient

from core.api import proxy
from core.api.app import create_app
from core.config import Settings
from core.link.messages import SetTargets, StartJob
from tests.client.openai import ChatServer
from tests.control import files
from tests.control.peer import EnginePeer
from tests.stack import until


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    # The path of a Unix socket may not be long.
    folder = tmp_path_factory.mktemp("o")
    return Settings(data_dir=folder, link_url=f"ipc:///tmp/{uuid4().hex[:12]}.sock", max_upload_mib=1)


@pytest.fixture(scope="module")
def http(settings: Settings) -> Iterator[TestClient]:
    """The application in this process; httpx's client in front of it is OpenAI's transport."""
    with TestClient(create_app(settings), base_url="http://127.0.0.1") as http:
        yield http


@pytest.fixture(scope="module")
def client(settings: Settings, http: TestClient) -> OpenAI:
    token = settings.token_file.read_text().strip()
    return OpenAI(base_url="http://127.0.0.1/v1", api_key=token, http_client=http, max_retries=0)


@pytest.fixture(scope="module")
def chat_engine() -> Iterator[ChatServer]:
    engine = ChatServer()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def peer(settings: Settings, client: OpenAI, chat_engine: ChatServer) -> Iterator[EnginePeer]:
    peer = EnginePeer(settings.resolved_link_url, http_url=chat_engine.url)
    yield peer
    peer.close()


@pytest.fixture
def engine(peer: EnginePeer, client: OpenAI) -> EnginePeer:
    """One that has just been heard of."""
    peer.hello()
    peer.expect(SetTargets)
    until(lambda: client.models.list().data)
    return peer


def upload(client: OpenAI, tmp_path: Path, rows: int = 8) -> openai.types.FileObject:
    """A file of a name of its own."""
    path = files.jsonl(tmp_path / f"Rivers {uuid4().hex[:6]}.jsonl", rows=rows)
    with path.open("rb") as file:
        return client.files.create(file=file, purpose="fine-tune")


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_file_goes_up_is_listed_comes_down_and_goes(client: OpenAI, tmp_path: Path) -> None:
    sent = upload(client, tmp_path, rows=3)
    assert (sent.object, sent.purpose, sent.status) == ("file", "fine-tune", "processed")
    assert sent.filename.startswith("rivers-") and sent.filename.endswith(".jsonl")
    assert abs(sent.created_at - time.time()) < 60
    assert client.files.retrieve(sent.id) == sent
    assert sent in client.files.list().data
    rows = [json.loads(line) for line in client.files.content(sent.id).text.splitlines()]
    assert rows[1]["messages"][0] == {"role": "user", "content": "Where does river 1 go?"}
    assert len(rows) == 3
    assert client.files.delete(sent.id).deleted
    with pytest.raises(openai.NotFoundError) as caught:
        client.files.retrieve(sent.id)
    assert (caught.value.code, caught.value.type) == ("file_not_found", "invalid_request_error")
    assert sent.id in caught.value.message


def test_files_come_in_pages_and_in_both_orders(client: OpenAI, tmp_path: Path) -> None:
    sent = [upload(client, tmp_path, rows=1).id for _ in range(3)]
    newest_first = [file.id for file in client.files.list(limit=2)]
    assert newest_first[:3] == sent[::-1]
    assert [file.id for file in client.files.list(order="asc", limit=2)] == newest_first[::-1]
    assert client.files.list(purpose="batch").data == []


def test_a_file_of_the_same_name_is_its_next_version(client: OpenAI) -> None:
    row = b'{"prompt": "a?", "completion": "b"}\n'
    first, second = (
        client.files.create(file=("lakes.jsonl", io.BytesIO(row * (n + 1))), purpose="fine-tune") for n in range(2)
    )
    assert first.id != second.id
    assert first.filename == second.filename == "lakes.jsonl"


def test_a_file_that_cannot_be_trained_on_is_refused_with_the_place(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        rows = b'{"prompt": "a?", "completion": "b"}\n{"prompt": "c?", "completion": [1]}\n'
        client.files.create(file=("bad.jsonl", rows), purpose="fine-tune")
    assert "line 2" in caught.value.message


def test_other_purposes_and_unknown_fields_are_refused(client: OpenAI) -> None:
    row = b'{"prompt": "a?", "completion": "b"}\n'
    with pytest.raises(openai.BadRequestError, match="batch") as caught:
        client.files.create(file=("a.jsonl", row), purpose="batch")
    assert caught.value.param == "purpose"
    with pytest.raises(openai.BadRequestError, match="expires_after"):
        client.files.create(
            file=("a.jsonl", row), purpose="fine-tune", expires_after={"anchor": "created_at", "seconds": 3600}
        )


# ---- fine-tuning jobs ------------------------------------------------------------------------------------------------


def test_a_job_goes_its_way_under_openais_client(client: OpenAI, engine: EnginePeer, tmp_path: Path) -> None:
    file = upload(client, tmp_path)
    job = client.fine_tuning.jobs.create(
        model="small",
        training_file=file.id,
        suffix="Sailor",
        seed=7,
        method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": "auto"}}},
        metadata={"team": "sea"},
    )
    assert (job.object, job.model, job.training_file, job.seed) == ("fine_tuning.job", "small", file.id, 7)
    assert job.hyperparameters.n_epochs == 2
    assert job.metadata == {"team": "sea"}
    assert job.fine_tuned_model is None
    order = engine.expect(StartJob)
    assert (order.spec.adapter_name, order.spec.epochs, order.spec.seed) == ("sailor", 2.0, 7)
    engine.update(job.id, order.token, "started", total_steps=2)
    for step in (1, 2):
        engine.update(job.id, order.token, "metric", step=step, loss=3.0 - step, tokens=256 * step)
    checkpoint = files.checkpoint(Path(order.spec.output_dir), 2)
    engine.update(job.id, order.token, "checkpoint", step=2, path=str(checkpoint))
    (listed,) = until(lambda: client.fine_tuning.jobs.checkpoints.list(job.id).data)
    assert (listed.step_number, listed.metrics.train_loss) == (2, 1.0)
    assert client.fine_tuning.jobs.retrieve(job.id).status == "running"
    folder = files.adapter(Path(order.spec.output_dir) / "adapter")
    engine.update(job.id, order.token, "succeeded", step=2, path=str(folder))
    until(lambda: client.fine_tuning.jobs.retrieve(job.id).status == "succeeded")
    done = client.fine_tuning.jobs.retrieve(job.id)
    assert (done.fine_tuned_model, done.trained_tokens) == ("sailor", 512)
    assert done.finished_at is not None and done.finished_at >= done.created_at
    (saved,) = client.fine_tuning.jobs.checkpoints.list(job.id).data
    assert saved.fine_tuned_model_checkpoint == "sailor@1"
    # Results are a file, as with OpenAI.
    (result,) = done.result_files
    assert client.files.retrieve(result).purpose == "fine-tune-results"
    assert client.files.content(result).text.splitlines()[:2] == [
        "step,train_loss,valid_loss,learning_rate,trained_tokens", "1,2.0,,,256",
    ]  # fmt: skip
    # Events: the newest first, page after page without a gap.
    seen = list(client.fine_tuning.jobs.list_events(job.id, limit=2))
    assert len({event.id for event in seen}) == len(seen) > 4
    assert [event.created_at for event in seen] == sorted((event.created_at for event in seen), reverse=True)
    measured = [event.data for event in seen if event.type == "metrics"]
    assert [figures["train_loss"] for figures in measured if isinstance(figures, dict)] == [1.0, 2.0]
    assert seen[-1].message == "submitted"


def test_jobs_are_paused_resumed_cancelled_and_listed_in_pages(client: OpenAI, tmp_path: Path) -> None:
    file = upload(client, tmp_path)
    made = [client.fine_tuning.jobs.create(model="small", training_file=file.id) for _ in range(3)]
    assert len({job.id for job in made}) == 3, "jobs without a suffix do not get into each other's way"
    assert [job.id for job in client.fine_tuning.jobs.list(limit=2)][:3] == [job.id for job in made[::-1]]
    job = made[-1]
    assert client.fine_tuning.jobs.pause(job.id).status == "paused"
    assert client.fine_tuning.jobs.resume(job.id).status == "queued"
    assert client.fine_tuning.jobs.cancel(job.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        client.fine_tuning.jobs.cancel(job.id)
    with pytest.raises(openai.BadRequestError, match="reads data set"):
        client.files.delete(file.id)
    for other in made[:-1]:
        client.fine_tuning.jobs.cancel(other.id)


def test_the_same_request_with_the_same_key_is_one_job(client: OpenAI, tmp_path: Path) -> None:
    file = upload(client, tmp_path)
    both = [
        client.fine_tuning.jobs.create(
            model="small", training_file=file.id, extra_headers={"Idempotency-Key": f"press-{file.id}"}
        )
        for _ in range(2)
    ]
    assert both[0].id == both[1].id
    client.fine_tuning.jobs.cancel(both[0].id)


def test_a_job_that_came_another_way_is_told_in_openais_terms(client: OpenAI, http: TestClient, tmp_path: Path) -> None:
    file = upload(client, tmp_path)
    body = {"dataset": file.id, "adapter_name": f"a-{uuid4().hex[:6]}", "epochs": 1.5, "learning_rate": 2e-12}
    made = http.post("/api/jobs", json=body, headers={"Authorization": f"Bearer {client.api_key}"}).json()
    job = client.fine_tuning.jobs.retrieve(made["id"])
    assert job.hyperparameters.learning_rate_multiplier == 2e-9
    assert job.hyperparameters.n_epochs is None
    client.fine_tuning.jobs.cancel(job.id)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"model": "gpt-4o-mini"}, "model"),
        ({"training_file": "file-none"}, "training_file"),
        ({"validation_file": "file-1"}, "validation_file"),
        ({"method": {"type": "dpo"}}, "method.type"),
        ({"integrations": [{"type": "wandb", "wandb": {"project": "p"}}]}, "integrations"),
        ({"hyperparameters": {"n_epochs": 0}}, "hyperparameters.n_epochs"),
        ({"method": {"type": "supervised", "supervised": {"hyperparameters": {"batch_size": 8}}}}, "batch_size"),
    ],
)
def test_what_harli_cannot_do_as_asked_is_refused_with_the_field(
    client: OpenAI, engine: EnginePeer, tmp_path: Path, change: dict[str, Any], param: str
) -> None:
    # The peer's model has no tokenizer, so that how many rows fill a batch is not known.
    asked: dict[str, Any] = {"model": "small", "training_file": upload(client, tmp_path, rows=2).id, **change}
    before = [job.id for job in client.fine_tuning.jobs.list()]
    with pytest.raises(openai.APIStatusError) as caught:
        client.fine_tuning.jobs.create(**asked)
    assert param in (caught.value.param or "")
    assert [job.id for job in client.fine_tuning.jobs.list()] == before


# ---- models and what they answer -------------------------------------------------------------------------------------


def test_the_served_model_is_listed_and_answers_whole_and_in_pieces(
    client: OpenAI, engine: EnginePeer, chat_engine: ChatServer
) -> None:
    assert "small" in [model.id for model in client.models.list()]
    assert client.models.retrieve("small").owned_by == "harli"
    chat: list[Any] = [{"role": "user", "content": "Where does the river go?"}]
    whole = client.chat.completions.create(model="small", messages=chat, max_tokens=9)
    assert whole.choices[0].message.content == "Down to the sea."
    assert chat_engine.requests[-1]["max_tokens"] == 9
    pieces = client.chat.completions.create(model="small", messages=chat, stream=True)
    assert [piece.choices[0].delta.content for piece in pieces if piece.choices] == ["Down", " to", " the sea.", ""]
    assert client.completions.create(model="small", prompt="The river").choices[0].text == "Down to the sea."
    assert "authorization" not in chat_engine.headers[-1], "the engine has no business with the token"


def test_an_adapter_is_a_model_by_its_name_once_it_is_deployed(
    client: OpenAI, engine: EnginePeer, chat_engine: ChatServer, http: TestClient, tmp_path: Path
) -> None:
    name = f"bosun-{uuid4().hex[:6]}"
    archive = Path(shutil.make_archive(str(tmp_path / name), "zip", files.adapter(tmp_path / "peft")))
    headers = {"Authorization": f"Bearer {client.api_key}"}
    with archive.open("rb") as file:
        sent = http.post(f"/api/adapters?name={name}", files={"file": file}, headers=headers)
    assert sent.status_code == 201, sent.text
    with pytest.raises(openai.NotFoundError, match="deploy it first") as caught:
        client.chat.completions.create(model=name, messages=[{"role": "user", "content": "Aye?"}])
    assert caught.value.code == "model_not_found"
    http.post(f"/api/adapters/{name}/deploy", headers=headers)
    until(lambda: name in [model.id for model in client.models.list()], what="the adapter to be served")
    for model in (name, f"{name}@1", f"small:{name}"):
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Aye?"}])
        assert chat_engine.requests[-1]["model"] == f"small:{name}"
    assert client.models.delete(name).deleted
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve(name)


def test_what_the_engine_refuses_is_said_in_its_words(
    client: OpenAI, engine: EnginePeer, chat_engine: ChatServer
) -> None:
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "Aye?"}])
    chat_engine.refusal = "the prompt is longer than the context"
    try:
        with pytest.raises(openai.BadRequestError, match="longer than the context") as caught:
            client.chat.completions.create(model="small", messages=[{"role": "user", "content": "Aye?"}])
        assert caught.value.type == "invalid_request_error"
    finally:
        chat_engine.refusal = None


def test_a_connection_that_the_engine_may_be_closing_is_not_used(chat_engine: ChatServer) -> None:
    """After 5 s without a request it does."""

    async def ask() -> None:
        async with proxy.client() as http:
            for pause_s in (0.0, 3.0):
                await asyncio.sleep(pause_s)
                await http.post(f"{chat_engine.url}/v1/completions", json={})

    asyncio.run(ask())
    before, after = chat_engine.connections[-2:]
    assert before != after


def test_an_engine_that_breaks_off_is_an_error_in_the_stream(
    client: OpenAI, engine: EnginePeer, chat_engine: ChatServer
) -> None:
    chat_engine.cut = True
    try:
        with pytest.raises(openai.APIError, match="broke off"):
            for _ in client.chat.completions.create(
                model="small", messages=[{"role": "user", "content": "Aye?"}], stream=True
            ):
                pass
    finally:
        chat_engine.cut = False


# ---- who may ---------------------------------------------------------------------------------------------------------


def test_the_api_key_is_a_token_and_a_wrong_one_is_refused_in_openais_shape(http: TestClient) -> None:
    stranger = OpenAI(base_url="http://127.0.0.1/v1", api_key="sk-wrong", http_client=http, max_retries=0)
    with pytest.raises(openai.AuthenticationError) as caught:
        stranger.models.list()
    assert caught.value.type == "authentication_error"


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"top_p": NaN}', b"[" * 100_000, b'{"model": 7}', b"\xff"])
def test_a_question_that_is_not_one_is_refused(client: OpenAI, http: TestClient, body: bytes) -> None:
    headers = {"Authorization": f"Bearer {client.api_key}"}
    answer = http.post("/v1/chat/completions", content=body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_whatever_text_there_is_reaches_the_engine_as_it_came(
    client: OpenAI, http: TestClient, engine: EnginePeer, chat_engine: ChatServer
) -> None:
    headers = {"Authorization": f"Bearer {client.api_key}"}
    said = [{"role": "user", "content": "Zürich \u2028 \U0001f30a \ud800"}]
    http.post("/v1/chat/completions", content=json.dumps({"messages": said}), headers=headers)
    assert chat_engine.requests[-1] == {"model": "small", "messages": said}


def test_every_error_under_v1_has_openais_shape(client: OpenAI, http: TestClient) -> None:
    headers = {"Authorization": f"Bearer {client.api_key}"}
    answers: list[httpx.Response] = [
        http.get("/v1/nothing", headers=headers),
        http.get("/v1/files?limit=0", headers=headers),
        http.post("/v1/chat/completions", content=b"{", headers=headers),
        http.get("/v1/models"),
        http.get("/v1/models", headers={**headers, "Host": "evil.example"}),
    ]
    assert [answer.status_code for answer in answers] == [404, 400, 400, 401, 403]
    for answer in answers:
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
