"""The console in front of the real API and its store, with a peer in the engine's place."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from streamlit import config

from core.api.schemas import Dataset
from core.client import TERMINAL, Client
from core.config import EngineSettings, Settings
from core.errors import HarliError
from tests.app.browser import chrome, faults, new_page, page, viewer  # noqa: F401
from tests.app.peer import Peer
from tests.machine import ROOT
from tests.stack import free_ports, running, until


@dataclass(frozen=True)
class Backstage:
    """What the tests see beside the browser: a client, the console's address, the API's data directory."""

    client: Client
    url: str
    data_dir: Path


@pytest.fixture(scope="package", autouse=True)
def listens_here() -> None:
    """As the console's configuration has it; a page that is run without a server does not read that."""
    config.set_option("server.address", "127.0.0.1")


@pytest.fixture(scope="package")
def backstage(tmp_path_factory: pytest.TempPathFactory, bundled_model: Path) -> Iterator[Backstage]:
    api, engine, port = free_ports(3)
    settings = Settings(
        data_dir=tmp_path_factory.mktemp("api"),
        api_port=api,
        engine_port=engine,
        console_port=port,
        engine=EngineSettings(model=bundled_model),
    )
    with (
        running(settings, "core.api"),
        console(settings, tmp_path_factory.mktemp("console")),
        Client(settings.api_url, token=settings.token_file) as client,
    ):
        until(lambda: answers(client), 120, "the API")
        with Peer(settings.resolved_link_url, bundled_model, settings.engine_url):
            until(lambda: client.live().now is not None, 60, "the first figures")
            yield Backstage(client, settings.console_url, settings.data_dir)


@contextmanager
def console(settings: Settings, folder: Path) -> Iterator[None]:
    """A console of the API that `settings` name; its output goes to `folder`."""
    address = ["--server.address=127.0.0.1", f"--server.port={settings.console_port}"]
    with running(settings, "streamlit", "run", str(ROOT / "app" / "main.py"), *address, folder=folder):
        until(lambda: listens(settings.console_port), 120, "the console")
        yield


def listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def answers(client: Client) -> bool:
    try:
        client.health()
    except HarliError:
        return False
    return True


@pytest.fixture
def quiet(backstage: Backstage) -> Iterator[Backstage]:
    """No job is left running or waiting when the test ends."""
    yield backstage
    for job in backstage.client.jobs().items:
        if job.state not in TERMINAL:
            backstage.client.stop_job(job.id)
    until(lambda: all(job.state in TERMINAL for job in backstage.client.jobs().items), 60, "all jobs to end")


def rows(count: int) -> bytes:
    """JSON Lines of `count` prompt/completion rows."""
    texts = [(f"What is {n} and {n}?", f"Aye, {n} and {n} be {2 * n}.") for n in range(count)]
    lines = (json.dumps({"prompt": prompt, "completion": completion}) for prompt, completion in texts)
    return "".join(f"{line}\n" for line in lines).encode()


@pytest.fixture
def make_dataset(backstage: Backstage, tmp_path: Path) -> Callable[[str], Dataset]:
    """Stores a small data set under a name."""

    def make(name: str) -> Dataset:
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes(rows(40))
        return backstage.client.upload_dataset(path, name)

    return make
