"""The parts that run for real in tests: the bundled model's folder and the whole stack."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from core.config import Settings
from core.serving import model_folder
from tests.machine import ROOT


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that nothing listens on now, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


@pytest.fixture(scope="session")
def bundled_model() -> Path:
    """The bundled model's folder, converted once per checkout into .cache."""
    return model_folder.ensure(Settings(data_dir=ROOT / ".cache"))
