"""``python -m core.api``: what it says when it cannot start, and how it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from core.client import Client
from core.client.token import Bearer
from core.errors import HarliError
from tests.stack import free_ports, until


def environment(data_dir: Path, port: int, **more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HARLI_")}
    return inherited | {"HARLI_DATA_DIR": str(data_dir), "HARLI_API_PORT": str(port), **more}


def refused(data_dir: Path, port: int, **more: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "core.api"],
        env=environment(data_dir, port, **more),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_port_that_is_taken_is_named_with_the_setting(data_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = refused(data_dir, port)
    assert f"127.0.0.1:{port}" in message
    assert "HARLI_API_PORT" in message


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"HARLI_DATABASE_URL": "postgresql://u:secret@127.0.0.1:1/x"}, "cannot be opened"),
        ({"HARLI_DATABASE_URL": "nonsense"}, "HARLI_DATABASE_URL"),
        ({"HARLI_MAX_UPLOAD_MIB": "lots"}, 'max_upload_mib is "lots"'),
        ({"HARLI_ENGINE__MAX_LORA_RANK": "0"}, 'engine.max_lora_rank is "0"'),
    ],
)
def test_a_setting_that_is_wrong_is_named(data_dir: Path, settings: dict[str, str], said: str) -> None:
    (port,) = free_ports(1)
    message = refused(data_dir, port, **settings)
    assert said in message
    assert "secret" not in message


def test_sigterm_ends_it_in_order_even_while_someone_listens(data_dir: Path) -> None:
    (port,) = free_ports(1)
    process = subprocess.Popen(
        [sys.executable, "-m", "core.api"], env=environment(data_dir, port), stderr=subprocess.PIPE
    )
    try:
        with Client(f"http://127.0.0.1:{port}", token=data_dir / "admin-token") as client:

            def answers() -> bool:
                assert process.poll() is None
                try:
                    return client.health().dispatcher
                except HarliError:
                    return False

            until(answers, 120, "the API")
            url, auth = f"http://127.0.0.1:{port}", Bearer(f"http://127.0.0.1:{port}", data_dir / "admin-token")
            with httpx.stream("GET", f"{url}/api/events", auth=auth, timeout=60) as response:
                process.send_signal(signal.SIGTERM)
                response.read()
            assert process.wait(60) == 0
            with pytest.raises(HarliError, match="harli up"):
                client.health()
    finally:
        if process.poll() is None:
            process.kill()
    assert process.stderr is not None
    log = process.stderr.read().decode()
    assert "no longer dispatches" in log
    assert "ERROR" not in log
