"""The client for event loops has the calls of the other one, awaited."""

from __future__ import annotations

import asyncio
import inspect
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.api import schemas
from core.client import AsyncClient, Client, connecting, sent
from core.client.steps import Request, exchange
from core.config import Settings
from core.errors import Conflict, Invalid, NotFound, Unavailable
from core.link.messages import SetTargets
from tests.api.serving import served
from tests.client.openai import ChatServer
from tests.control import files
from tests.control.peer import EnginePeer
from tests.stack import free_ports


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    folder = tmp_path_factory.mktemp("data")
    with served(folder) as settings:
        yield settings


@pytest.fixture(scope="module")
def chat_server() -> Iterator[ChatServer]:
    server = ChatServer()
    yield server
    server.close()


def client_of(settings: Settings) -> AsyncClient:
    return AsyncClient(settings.api_url, token=settings.token_file)


def test_both_clients_have_the_same_calls() -> None:
    def calls(kind: type) -> set[str]:
        return {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}

    assert calls(AsyncClient) - calls(Client) == {"chat_stream"}
    assert calls(Client) <= calls(AsyncClient)


def test_a_call_says_what_its_caller_gets() -> None:
    signature = inspect.signature(Client("http://127.0.0.1:1", token="t").job)
    assert list(signature.parameters) == ["job_id"]
    assert signature.return_annotation == "schemas.Job"


def test_data_sets_and_jobs_are_awaited(settings: Settings, tmp_path: Path) -> None:
    async def journey() -> None:
        async with client_of(settings) as client:
            sent_bytes: list[int] = []
            path = files.jsonl(tmp_path / "rivers.jsonl")
            dataset = await client.upload_dataset(path, on_progress=lambda done, _total: sent_bytes.append(done))
            assert sent_bytes[-1] == path.stat().st_size
            with pytest.raises(Conflict, match="rivers"):
                await client.upload_dataset(path)
            assert (await client.download_dataset(dataset.id, tmp_path)).name == "rivers-1.parquet"
            job = await client.submit_job(dataset=dataset.id, adapter_name="sailor")
            with pytest.raises(TimeoutError, match="queued"):
                await client.wait(job.id, timeout_s=0.1, poll_s=0.02)
            waiting = asyncio.create_task(client.wait(job.id, poll_s=0.02))
            await asyncio.sleep(0.05)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert (await client.job(job.id)).state == "queued", "who stops waiting leaves the job alone"
            assert (await client.stop_job(job.id)).state == "cancelled"
            with pytest.raises(NotFound):
                await client.download_dataset("nothing", tmp_path)
        assert not list(tmp_path.glob(".*.part"))

    asyncio.run(journey())


def test_events_come_as_they_happen(settings: Settings) -> None:
    async def first() -> schemas.Event:
        async with client_of(settings) as client:
            events = client.events()
            waiting = asyncio.create_task(anext(events))
            async with asyncio.timeout(60):
                while not waiting.done():
                    version = (await client.targets()).version
                    await client.set_targets([{"kind": "itl", "ms": 40 + version}], version)
                    await asyncio.wait({waiting}, timeout=0.2)
                event = await waiting
            await events.aclose()
            return event

    assert asyncio.run(first()).topic == "targets"


def test_an_answer_comes_whole_or_in_pieces(settings: Settings, chat_server: ChatServer) -> None:
    peer = EnginePeer(settings.resolved_link_url, http_url=chat_server.url)
    peer.hello()
    peer.expect(SetTargets)

    async def ask() -> None:
        async with client_of(settings) as client:
            assert (await client.wait_for_engine(60, poll_s=0.05)).model == "small"
            pieces = await client.chat_stream("Where does the river go?")
            assert [piece async for piece in pieces] == ["Down", " to", " the sea."]
            assert pieces.reply is not None and pieces.reply.completion_tokens == 3
            assert (await client.chat("And then?")).text == "Down to the sea."
            chat_server.refusal = "too long"
            with pytest.raises(Invalid, match="too long"):
                await client.chat("And then?")
            chat_server.refusal = None
            chat_server.cut = True
            with pytest.raises(Unavailable, match="broke off"):
                await client.chat("And then?")
            chat_server.cut = False

    asyncio.run(ask())
    peer.close()


def test_where_no_api_answers_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sent, "_RECONNECT_S", 0.1)

    async def reach() -> None:
        async with AsyncClient(f"http://127.0.0.1:{free_ports(1)[0]}", token="t") as client:
            with pytest.raises(Unavailable, match="harli up"):
                await client.jobs()
            with pytest.raises(Unavailable, match="harli up"):
                await anext(client.events())

    asyncio.run(reach())


def test_a_description_is_told_of_what_went_wrong_on_the_way() -> None:
    """So that what it opened is closed."""
    closed: list[str] = []

    def describe() -> Iterator[Request]:
        try:
            yield from exchange("GET", "/api/health")
        finally:
            closed.append("closed")

    with Client(f"http://127.0.0.1:{free_ports(1)[0]}", token="t") as client, pytest.raises(Unavailable):
        client.run(describe())  # type: ignore[arg-type]
    assert closed == ["closed"]


# ---- starting --------------------------------------------------------------------------------------------------------


def test_connect_attaches_to_what_runs(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARLI_API_PORT", str(settings.api_port))
    monkeypatch.setenv("HARLI_DATA_DIR", str(settings.data_dir))
    peer = EnginePeer(settings.resolved_link_url)
    peer.hello()
    monkeypatch.setattr(connecting, "_up", lambda log: pytest.fail("it runs already"))
    with connecting.connect(start=True) as client:
        assert client.engine().state == "ready"
    peer.close()


def test_a_start_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    api, console = free_ports(2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name, value in (
            ("API_PORT", api),
            ("CONSOLE_PORT", console),
            ("ENGINE_PORT", port),
            ("DATA_DIR", tmp_path),
        ):
            monkeypatch.setenv(f"HARLI_{name}", str(value))
        with pytest.raises(Unavailable, match=f"port {port}") as caught:
            connecting.connect(start=True)
    assert caught.value.code == "start_failed"


def test_only_ours_is_started() -> None:
    with pytest.raises(Unavailable, match="does not answer"):
        connecting.connect(f"http://127.0.0.1:{free_ports(1)[0]}", token="t", start=True)
