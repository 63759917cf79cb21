"""The parts that run for real in tests: the bundled model's folder, the API alone, and the whole of `harli up`.

They are processes of their own, on free ports and in temporary data directories, and must end without orphans.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
from pydantic import TypeAdapter

from core.api.schemas import Part
from core.client import Client
from core.config import EngineSettings, FinetuneSettings, Settings
from core.errors import HarliError
from core.serving import model_folder
from tests.machine import ROOT

T = TypeVar("T")
_PARTS = TypeAdapter(list[Part])
_RANDOM = random.SystemRandom()  # two processes of tests never draw the same
_READY_S = 240.0
_STOPPED_S = 90.0


def _ports() -> range:
    """Those that connections going out are not given, where the machine leaves some: one that is free stays so until
    the process that it is for has started."""
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    return range(10_000, first_outgoing if first_outgoing > 11_000 else 65_536)


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that nothing listens on now, all different."""
    found: list[int] = []
    while len(found) < count:
        port = _RANDOM.choice(_ports())
        if port not in found:
            with suppress(OSError), socket.create_server(("127.0.0.1", port)):
                found.append(port)
    return found


def until(condition: Callable[[], T | None], timeout_s: float = 30.0, what: str = "it", pause_s: float = 0.05) -> T:
    """The first true value of `condition`; the test fails, naming `what`, when none comes in time."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s in vain for {what}"
        time.sleep(pause_s)
    return value


def lives(pid: int) -> bool:
    """Whether a process runs; one that ended and was not collected does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="session")
def bundled_model() -> Path:
    """The bundled model's folder, converted once per checkout into .cache."""
    return model_folder.ensure(Settings(data_dir=ROOT / ".cache"))


def _settings(data_dir: Path, model: Path) -> Settings:
    api, engine, console = free_ports(3)
    return Settings(
        data_dir=data_dir,
        api_port=api,
        engine_port=engine,
        console_port=console,
        engine=EngineSettings(model=model),
        finetune=FinetuneSettings(micro_batch_tokens=128),  # half of what a step of a job takes by default
    )


def environment(settings: Settings) -> dict[str, str]:
    """The environment in which a process of Harli has these settings and no others."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HARLI_")}
    return inherited | {
        "HARLI_DATA_DIR": str(settings.data_dir),
        "HARLI_API_PORT": str(settings.api_port),
        "HARLI_ENGINE_PORT": str(settings.engine_port),
        "HARLI_CONSOLE_PORT": str(settings.console_port),
        "HARLI_ENGINE__MODEL": str(settings.engine.model),
        "HARLI_FINETUNE__MICRO_BATCH_TOKENS": str(settings.finetune.micro_batch_tokens),
    }


@contextmanager
def running(settings: Settings, *module: str, folder: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """``python -m MODULE...`` in a folder (None: the data directory), which also takes its output; SIGTERM must end it
    and all of its descendants."""
    place = folder or settings.data_dir
    output = place / "output.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *module],
            env=environment(settings),
            cwd=place,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
        assert process.poll() is None, f"it ended by itself:\n{output.read_text()}"
    finally:
        family = [process.pid]
        if process.poll() is None:
            family += [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOPPED_S)
        finally:
            orphans = [pid for pid in family if lives(pid)]
            for pid in orphans:
                os.kill(pid, signal.SIGKILL)
    assert orphans == [], "everything ends with the process that started it"
    assert process.returncode == 0, output.read_text()


def _answers(process: subprocess.Popen[bytes], settings: Settings, client: Client) -> bool:
    output = (settings.data_dir / "output.txt").read_text()
    assert process.poll() is None, f"it ended by itself:\n{output}"
    try:
        client.health()
    except HarliError:
        return False
    return True


@dataclass(frozen=True)
class Stack:
    """A running `harli up`."""

    settings: Settings
    client: Client
    process: subprocess.Popen[bytes]

    @property
    def console_url(self) -> str:
        return self.settings.console_url

    @property
    def engine_url(self) -> str:
        return self.settings.engine_url

    def part(self, name: str) -> Part | None:
        """A part as the supervisor last noted it."""
        path = self.settings.data_dir / "run" / "parts.json"
        if not path.exists():
            return None
        return next((part for part in _PARTS.validate_json(path.read_bytes()) if part.name == name), None)

    def log(self, name: str) -> str:
        """What a part has printed since `harli up` started."""
        return (self.settings.data_dir / "logs" / f"{name}.log").read_text("utf-8", "replace")

    def is_ready(self) -> bool:
        """Whether every part is; fails when `harli up` has ended."""
        output = (self.settings.data_dir / "output.txt").read_text()
        assert self.process.poll() is None, f"`harli up` ended:\n{output}"
        parts = [self.part(name) for name in ("api", "engine", "console")]
        return all(part is not None and part.state == "ready" for part in parts)

    def kill_engine(self) -> int:
        """SIGKILL to every process of the engine at once; its old process id. The supervisor starts it again."""
        part = self.part("engine")
        assert part is not None
        assert part.pid is not None
        os.killpg(part.pid, signal.SIGKILL)
        until(lambda: not lives(part.pid or 0), 10, "the engine's death")
        return part.pid

    def restart_engine(self) -> None:
        """Kill the engine and wait until a new one serves."""
        old = self.kill_engine()

        def is_back() -> bool:
            part = self.part("engine")
            return part is not None and part.state == "ready" and part.pid != old

        until(is_back, _READY_S, "the engine's return")


@pytest.fixture(scope="session")
def api_settings(tmp_path_factory: pytest.TempPathFactory, bundled_model: Path) -> Iterator[Settings]:
    """The settings of an API process without an engine: jobs stay queued, nothing is served."""
    settings = _settings(tmp_path_factory.mktemp("api"), bundled_model)
    with running(settings, "core.api") as process, Client(settings.api_url) as client:
        until(lambda: _answers(process, settings, client), 60, "the API")
        yield settings


@pytest.fixture(scope="session")
def api(api_settings: Settings) -> Iterator[Client]:
    """A client of that process."""
    with Client(api_settings.api_url, token=api_settings.token_file) as client:
        yield client


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, bundled_model: Path) -> Iterator[Stack]:
    """The whole of Harli, shared by all tests of a run: leave it as it was found."""
    settings = _settings(tmp_path_factory.mktemp("stack"), bundled_model)
    with (
        running(settings, "core.cli", "up") as process,
        Client(settings.api_url, token=settings.token_file) as client,
    ):
        stack = Stack(settings, client, process)
        until(stack.is_ready, _READY_S, "`harli up` to be ready", pause_s=0.5)
        yield stack
