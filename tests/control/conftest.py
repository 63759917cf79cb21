"""A control plane on each database; with its dispatcher at work; with an engine's peer connected."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from core.api import schemas
from core.config import Settings
from core.control import dispatcher, jobs
from core.control.context import Control, open_control
from core.control.owner import Owner
from core.link.messages import StartJob
from tests.control import files
from tests.control.peer import AdapterServer, EnginePeer
from tests.intake import models


@pytest.fixture
def settings(store_url: str, data_dir: Path) -> Iterator[Settings]:
    # The path of a Unix socket may not be long, and pytest's folders are.
    folder = Path(tempfile.mkdtemp(prefix="hl"))
    yield Settings(data_dir=data_dir, database_url=store_url, link_url=f"ipc://{folder}/link.sock")
    shutil.rmtree(folder)


@pytest.fixture
def control(settings: Settings) -> Iterator[Control]:
    opened = open_control(settings)
    yield opened
    opened.store.close()


@pytest.fixture
def owner(control: Control, monkeypatch: pytest.MonkeyPatch) -> Iterator[Owner]:
    # Peers report when a test says so, and are not lost for that, however long the test takes.
    monkeypatch.setattr(dispatcher, "SILENCE_S", 600.0)
    started = Owner(control)
    started.start()
    yield started
    started.stop()


@pytest.fixture
def connect(settings: Settings, owner: Owner) -> Iterator[Callable[..., EnginePeer]]:
    """Connects an engine's peer, which has yet to say hello."""
    peers: list[EnginePeer] = []

    def make(engine_id: str = "engine-1", http_url: str = "http://127.0.0.1:1") -> EnginePeer:
        assert settings.link_url is not None
        peers.append(EnginePeer(settings.link_url, engine_id, http_url))
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()


@pytest.fixture
def engine(connect: Callable[..., EnginePeer]) -> EnginePeer:
    """An engine that has said hello."""
    peer = connect()
    peer.hello()
    return peer


@pytest.fixture
def adapter_server() -> Iterator[AdapterServer]:
    server = AdapterServer()
    yield server
    server.close()


@pytest.fixture
def dataset(control: Control, tmp_path: Path) -> schemas.Dataset:
    return files.stored_dataset(control, tmp_path)


@pytest.fixture
def submit(control: Control, dataset: schemas.Dataset) -> Callable[..., schemas.Job]:
    def run(adapter_name: str = "sailor", **fields: object) -> schemas.Job:
        body = schemas.JobCreate.model_validate({"dataset": dataset.name, "adapter_name": adapter_name, **fields})
        return jobs.submit(control, body, None)[0]

    return run


@pytest.fixture
def running(engine: EnginePeer, submit: Callable[..., schemas.Job]) -> tuple[schemas.Job, StartJob]:
    """A job that the engine runs, and the order it got."""
    job = submit()
    order = engine.expect(StartJob)
    engine.update(job.id, order.token, "started", total_steps=30)
    return job, order


@pytest.fixture
def small_tokenizer(tmp_path: Path) -> Path:
    """A model folder with nothing but a tokenizer and a chat template."""
    return models.write(tmp_path / "model", models.CHATML, eos="<|im_end|>")
