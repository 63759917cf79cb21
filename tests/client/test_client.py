"""The typed client against a served API, with an engine's peer on the link."""

from __future__ import annotations

import inspect
import io
import signal
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from core.api import schemas
from core.client import ChatReply, Client, calls, connect, sent
from core.config import Settings
from core.errors import Conflict, Invalid, NotFound, TooLarge, Unauthorized, Unavailable
from core.intake import dataset
from core.link.messages import SetTargets, StartJob
from tests.api.serving import served
from tests.client.openai import ChatServer
from tests.control import files
from tests.control.peer import EnginePeer
from tests.stack import free_ports, until


@pytest.fixture
def settings(data_dir: Path) -> Iterator[Settings]:
    with served(data_dir, max_upload_mib=1) as settings:
        yield settings


@pytest.fixture
def client(settings: Settings) -> Iterator[Client]:
    with Client(settings.api_url, token=settings.token_file) as client:
        yield client


@pytest.fixture
def chat_server() -> Iterator[ChatServer]:
    server = ChatServer()
    yield server
    server.close()


@pytest.fixture
def engine(settings: Settings, client: Client, chat_server: ChatServer) -> Iterator[EnginePeer]:
    peer = EnginePeer(settings.resolved_link_url, http_url=chat_server.url)
    peer.hello()
    peer.expect(SetTargets)
    until(lambda: client.engine().state == "ready")
    yield peer
    peer.close()


@pytest.fixture
def rivers(client: Client, tmp_path: Path) -> schemas.Dataset:
    return client.upload_dataset(files.jsonl(tmp_path / "Rivers of Ruritania.jsonl"))


# ---- reaching it -----------------------------------------------------------------------------------------------------


def test_where_no_api_answers_it_says_so_and_what_to_do() -> None:
    (port,) = free_ports(1)
    for reach in (lambda: connect(f"http://127.0.0.1:{port}"), lambda: Client(f"http://127.0.0.1:{port}").jobs()):
        with pytest.raises(Unavailable, match=f"127.0.0.1:{port}.*harli up") as caught:
            reach()
        assert caught.value.code == "api_unreachable"


def test_something_else_that_answers_is_not_taken_for_it(chat_server: ChatServer) -> None:
    with pytest.raises(Exception, match="not as Harli's API does") as caught:
        connect(chat_server.url)
    assert getattr(caught.value, "code", None) == "not_harli"


def test_connect_reads_the_settings(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARLI_API_PORT", str(settings.api_port))
    monkeypatch.setenv("HARLI_DATA_DIR", str(settings.data_dir))
    with connect() as client:
        assert client.base_url == settings.api_url
        assert client.me().user == "admin"


def test_the_local_admins_token_is_shown_to_no_other_api(
    settings: Settings, chat_server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARLI_DATA_DIR", str(settings.data_dir))
    with Client(settings.api_url) as client, pytest.raises(Unauthorized):
        client.jobs()


def test_every_method_says_what_it_gives() -> None:
    for name, method in inspect.getmembers(Client, inspect.isfunction):
        if not name.startswith("_"):
            assert "return" in method.__annotations__, name


# ---- data sets -------------------------------------------------------------------------------------------------------


def test_a_data_set_goes_up_under_its_files_name_and_comes_down(
    client: Client, rivers: schemas.Dataset, tmp_path: Path
) -> None:
    assert (rivers.name, rivers.report.rows) == ("rivers-of-ruritania", 8)
    assert client.dataset(rivers.name) == client.dataset(rivers.id) == rivers
    assert client.datasets().items == [rivers]
    assert client.dataset_rows(rivers.id, offset=2, limit=1)[0].messages[0].content == "Where does river 2 go?"
    path = client.download_dataset(rivers.id, tmp_path)
    assert path.name == "rivers-of-ruritania-1.parquet"
    assert pq.read_table(path).num_rows == 8
    named = client.download_dataset(rivers.name, tmp_path / "mine.parquet")
    assert named.read_bytes() == path.read_bytes()
    client.delete_dataset(rivers.id)
    with pytest.raises(NotFound):
        client.dataset(rivers.id)


def test_an_upload_tells_how_far_it_is(client: Client, tmp_path: Path) -> None:
    path = files.jsonl(tmp_path / "lakes.jsonl", rows=2000)
    seen: list[tuple[int, int]] = []
    client.upload_dataset(path, on_progress=lambda sent, total: seen.append((sent, total)))
    size = path.stat().st_size
    assert seen[-1] == (size, size)
    assert len(seen) > 2
    assert [sent for sent, _ in seen] == sorted(sent for sent, _ in seen)


def test_an_open_file_goes_up_as_well(client: Client, tmp_path: Path) -> None:
    data = io.BytesIO(files.jsonl(tmp_path / "x.jsonl").read_bytes())
    assert client.upload_dataset(data, "seas", filename="seas.jsonl").name == "seas"


def test_a_taken_name_is_found_out_before_anything_is_sent(
    client: Client, rivers: schemas.Dataset, tmp_path: Path
) -> None:
    path = files.jsonl(tmp_path / "more.jsonl", rows=9)
    with pytest.raises(Conflict, match="already"):
        client.upload_dataset(path, rivers.name, on_progress=lambda _sent, _total: pytest.fail("something was sent"))
    assert client.upload_dataset(path, rivers.name, new_version=True).version == 2


def test_an_interrupt_ends_a_check_that_goes_on_by_itself(
    client: Client, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted = threading.Event()

    def ingest(*_: object, progress: Callable[[int, int], None], **__: object) -> None:
        for number in range(1000):
            progress(number, 1000)
            time.sleep(0.02)
        raise AssertionError("nobody cancelled the check")

    def interrupt() -> None:
        until(client.operations, what="the check")
        time.sleep(0.5)  # it is no longer waited for by the request
        interrupted.set()
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(dataset, "ingest", ingest)
    monkeypatch.setattr(calls, "_PATIENCE_S", 0.2)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        client.upload_dataset(files.jsonl(tmp_path / "rivers.jsonl"))
    thread.join()
    assert interrupted.is_set()
    (operation,) = client.operations()
    assert until(lambda: client.operation(operation.id).state != "running", 30)
    assert client.operation(operation.id).state == "cancelled"
    until(lambda: not any((settings.data_dir / "uploads").iterdir()), what="the file to go")


def test_a_file_over_the_limit_is_not_sent(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "big.jsonl"
    path.write_bytes(b"x" * (1 << 20) + b"y")
    with pytest.raises(TooLarge, match=r"1048577 bytes.*1048576.*HARLI_MAX_UPLOAD_MIB"):
        client.upload_dataset(path)


def test_a_file_that_cannot_be_trained_on_comes_back_with_what_was_found(client: Client, tmp_path: Path) -> None:
    path = files.jsonl(tmp_path / "broken.jsonl", rows=2)
    path.write_text(path.read_text() + "{broken\n")
    with pytest.raises(Invalid, match="3") as caught:
        client.upload_dataset(path)
    assert isinstance(caught.value.report, schemas.DatasetReport)
    assert caught.value.report.findings[0].examples


@pytest.mark.parametrize(("name", "error"), [("missing.jsonl", NotFound), (".", Invalid)])
def test_a_path_that_is_no_file_is_said_here(client: Client, tmp_path: Path, name: str, error: type) -> None:
    with pytest.raises(error, match=str(tmp_path)):
        client.upload_dataset(tmp_path / name)


# ---- jobs ------------------------------------------------------------------------------------------------------------


def test_a_job_is_submitted_by_fields_or_body_and_one_press_is_one_job(client: Client, rivers: schemas.Dataset) -> None:
    job = client.submit_job(dataset=rivers.name, adapter_name="sailor", lora={"rank": 4}, idempotency_key="press")
    again = client.submit_job(
        schemas.JobCreate(dataset=rivers.name, adapter_name="sailor", lora=schemas.LoraBody(rank=4)),
        idempotency_key="press",
    )
    assert again.id == job.id
    assert job.spec.lora.rank == 4
    assert client.jobs().items == [client.job(job.id)]
    assert client.jobs(state="running").items == []


def test_pythons_own_types_are_taken_for_those_of_json(client: Client, rivers: schemas.Dataset) -> None:
    due = datetime.now(UTC) + timedelta(days=1)
    job = client.submit_job(dataset=rivers.name, adapter_name="sailor", sample_prompts=("Where?", "Why?"), deadline=due)
    assert job.spec.sample_prompts == ["Where?", "Why?"]
    assert job.spec.deadline == due


def test_pages_follow_each_other(client: Client, rivers: schemas.Dataset) -> None:
    made = [client.submit_job(dataset=rivers.id, adapter_name=f"a{number}").id for number in range(3)]
    first = client.jobs(limit=2)
    second = client.jobs(limit=2, cursor=first.next)
    assert [job.id for job in (*first.items, *second.items)] == made[::-1]
    assert second.next is None


def test_a_wrong_field_is_refused_with_the_words_of_the_api(client: Client) -> None:
    with pytest.raises(Invalid, match="learning_rate") as caught:
        client.submit_job(dataset="x", adapter_name="y", learning_rate=-1)
    assert caught.value.param == "learning_rate"


def test_jobs_are_paused_resumed_changed_and_stopped(client: Client, rivers: schemas.Dataset) -> None:
    job = client.submit_job(dataset=rivers.id, adapter_name="sailor")
    assert client.pause_job(job.id).state == "paused"
    assert client.resume_job(job.id).state == "queued"
    changed = client.update_job(job.id, priority=7)
    assert (changed.priority, changed.name) == (7, job.name)
    assert client.update_job(job.id, name="Ahab").name == "Ahab"
    with pytest.raises(Conflict, match="nothing to save"):
        client.stop_job(job.id, save=True)
    assert client.stop_job(job.id).state == "cancelled"
    with pytest.raises(Conflict, match="cancelled"):
        client.resume_job(job.id)


def test_waiting_sees_every_change_and_ends_with_the_job(
    client: Client, engine: EnginePeer, rivers: schemas.Dataset
) -> None:
    job = client.submit_job(dataset=rivers.id, adapter_name="sailor")
    order = engine.expect(StartJob)
    seen: list[schemas.Job] = []

    def train() -> None:
        engine.update(job.id, order.token, "started", total_steps=2)
        for step in (1, 2):
            until(lambda before=step - 1: seen and seen[-1].step == before, what="the waiting to see it")
            engine.update(job.id, order.token, "metric", step=step, loss=3.0 - step, tokens=256 * step)
        engine.update(job.id, order.token, "log", message="done")
        folder = files.adapter(Path(order.spec.output_dir) / "adapter")
        engine.update(job.id, order.token, "succeeded", step=2, path=str(folder))

    thread = threading.Thread(target=train)
    thread.start()
    done = client.wait(job.id, seen.append, timeout_s=60, poll_s=0.05)
    thread.join()
    assert (done.state, done.adapter_version, done.loss) == ("succeeded", 1, 1.0)
    assert seen[-1] == done
    assert {found.step for found in seen} == {0, 1, 2}
    assert [metric.loss for metric in client.job_metrics(job.id)] == [2.0, 1.0]
    assert [metric.step for metric in client.job_metrics(job.id, after=1)] == [2]
    log = client.job_log(job.id)
    assert "done" in [line.message for line in log]
    assert client.job_log(job.id, after=log[-2].id) == log[-1:]
    assert client.job_events(job.id)[-1].to_state == "succeeded"
    assert client.adapter("sailor").versions[0].job_id == job.id


def test_an_interrupt_ends_the_waiting_and_leaves_the_job_alone(client: Client, rivers: schemas.Dataset) -> None:
    job = client.submit_job(dataset=rivers.id, adapter_name="sailor")
    soon = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
    with pytest.raises(KeyboardInterrupt):
        client.wait(job.id, lambda _seen: soon.start(), poll_s=0.1)
    assert client.job(job.id).state == "queued"
    assert [event.kind for event in client.job_events(job.id)] == ["submitted"]


def test_waiting_can_be_bounded(client: Client, rivers: schemas.Dataset) -> None:
    job = client.submit_job(dataset=rivers.id, adapter_name="sailor")
    with pytest.raises(TimeoutError, match="queued"):
        client.wait(job.id, timeout_s=0.2, poll_s=0.05)


# ---- adapters --------------------------------------------------------------------------------------------------------


def test_an_adapter_goes_up_as_a_folder_or_a_zip_and_comes_down(client: Client, tmp_path: Path) -> None:
    folder = files.adapter(tmp_path / "captain")
    (folder / "checkpoint-1").mkdir()
    (folder / "checkpoint-1" / "optimizer.pt").write_bytes(b"x" * (2 << 20))
    assert client.upload_adapter(folder).name == "captain"
    path = client.download_adapter("captain", tmp_path)
    assert path.name == "captain-1.zip"
    with zipfile.ZipFile(path) as archive:
        assert "adapter_config.json" in archive.namelist()
    assert client.check_adapter_name("captain").available is False
    with pytest.raises(Conflict):
        client.upload_adapter(path, "captain")
    assert [v.version for v in client.upload_adapter(path, "captain", new_version=True).versions] == [1, 2]
    assert client.deploy_adapter("captain", 1).wanted_version == 1
    assert client.undeploy_adapter("captain").wanted_version is None
    client.delete_adapter("captain", version=1)
    assert [adapter.name for adapter in client.adapters().items] == ["captain"]
    client.delete_adapter("captain")
    with pytest.raises(NotFound, match="captain"):
        client.adapter("captain")


# ---- targets and figures ---------------------------------------------------------------------------------------------


def test_targets_are_set_by_version_or_over_whatever_is_there(client: Client) -> None:
    assert client.set_targets([schemas.TargetBody(kind="itl", ms=40)]).version == 1
    assert client.set_targets([{"kind": "ttft", "ms": 900}], version=1).version == 2
    with pytest.raises(Conflict, match="TTFT p99 ≤ 900 ms"):
        client.set_targets([], version=1)
    with pytest.raises(Invalid, match="ms") as caught:
        client.set_targets([{"kind": "itl", "ms": 0}])
    assert caught.value.param == "targets.0.ms"
    assert client.targets().targets[0].kind == "ttft"


def test_figures_come_typed(client: Client, engine: EnginePeer) -> None:
    for ago in (2.0, 1.0):
        engine.telemetry(time=time.time() - ago, itl=[(12.0, 2)], decode_tokens=2)
    live = until(lambda: (found := client.live(30)).window and found, what="figures")
    assert isinstance(live, schemas.Live)
    assert live.window is not None
    assert live.window.itl_p50_ms == 12.0
    assert live.engine.model == "small"
    points = until(lambda: client.telemetry(60, 60), what="a point")
    assert points[0].itl_p50_ms == 12.0
    assert client.parts() == []


# ---- chat ------------------------------------------------------------------------------------------------------------


def test_an_answer_streams_and_ends_with_its_figures(
    client: Client, engine: EnginePeer, chat_server: ChatServer
) -> None:
    stream = client.chat("Where does the river go?", max_tokens=16, temperature=0)
    assert list(stream) == ["Down", " to", " the sea."]
    reply = stream.reply
    assert reply is not None
    assert (reply.text, reply.finish_reason, reply.prompt_tokens, reply.completion_tokens) == (
        "Down to the sea.", "stop", 9, 3,
    )  # fmt: skip
    assert reply.first_ms is not None and 0 < reply.first_ms <= reply.total_ms
    sent = chat_server.requests[0]
    assert sent["model"] == "small"
    assert sent["messages"] == [{"role": "user", "content": "Where does the river go?"}]
    assert (sent["max_tokens"], sent["temperature"]) == (16, 0)


def test_an_adapter_is_addressed_by_its_name(
    client: Client, engine: EnginePeer, chat_server: ChatServer, tmp_path: Path
) -> None:
    client.upload_adapter(files.adapter(tmp_path / "sailor"))
    client.deploy_adapter("sailor")
    until(lambda: client.adapter("sailor").deployment == "deployed")
    messages = [schemas.Message(role="system", content="Ahoy"), {"role": "user", "content": "Where to?"}]
    reply = client.chat(messages, "sailor", stream=False)
    assert isinstance(reply, ChatReply)
    assert reply.text == "Down to the sea."
    assert chat_server.requests[-1]["model"] == "small:sailor"
    assert chat_server.requests[-1]["messages"][0] == {"role": "system", "content": "Ahoy"}


def test_what_the_engine_refuses_is_said_in_its_words(
    client: Client, engine: EnginePeer, chat_server: ChatServer
) -> None:
    chat_server.refusal = "the prompt is longer than the context"
    with pytest.raises(Invalid, match="the prompt is longer than the context"):
        client.chat("Hello", stream=False)
    with pytest.raises(NotFound, match="nobody"):
        client.chat("Hello", "nobody", stream=False)


def test_an_engine_that_breaks_off_is_no_end_of_an_answer(
    client: Client, engine: EnginePeer, chat_server: ChatServer
) -> None:
    chat_server.cut = True
    with pytest.raises(Unavailable, match="broke off"):
        client.chat("Hello", stream=False)


def test_a_reader_who_leaves_ends_the_generation(client: Client, engine: EnginePeer, chat_server: ChatServer) -> None:
    chat_server.pieces, chat_server.pause_s = ["word "] * 10_000, 0.02
    for _ in client.chat("Talk"):
        break
    assert chat_server.left.wait(60)


def test_without_an_engine_chat_says_so(client: Client) -> None:
    with pytest.raises(Unavailable, match="engine is absent"):
        client.chat("Hello", stream=False)


# ---- events ----------------------------------------------------------------------------------------------------------


def test_events_give_up_when_the_api_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sent, "_RECONNECT_S", 0.6)
    (port,) = free_ports(1)
    with pytest.raises(Unavailable):
        next(Client(f"http://127.0.0.1:{port}").events())
