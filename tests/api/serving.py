"""The API on a real port, in a thread of the test process."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import httpx
import uvicorn

from core.api.app import create_app
from core.config import Settings
from db.store import Store
from tests.stack import free_ports, until


@cache
def _migrated() -> bytes:
    """A store of SQLite without rows; making one takes longer than most tests."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "harli.db"
        Store(f"sqlite:///{path}").close()
        return path.read_bytes()


@contextlib.contextmanager
def served(data_dir: Path, **settings: object) -> Iterator[Settings]:
    """Serve the folder's store of SQLite, an empty one to begin with; the settings that it has."""
    # The path of a Unix socket may not be long, and pytest's folders are.
    folder = Path(tempfile.mkdtemp(prefix="hl"))
    api_port, console_port = free_ports(2)
    chosen = Settings.model_validate(
        {
            "data_dir": data_dir,
            "api_port": api_port,
            "console_port": console_port,
            "link_url": f"ipc://{folder}/link.sock",
            "requests_per_s": 10_000,
            **settings,
        }
    )
    store = data_dir / "harli.db"
    if chosen.database_url is None and not store.exists():
        store.write_bytes(_migrated())
    listener = socket.create_server(("127.0.0.1", api_port))
    # As `python -m core.api`: by itself uvicorn closes a connection after 5 s, perhaps while the next request is sent.
    config = uvicorn.Config(create_app(chosen), log_config=None, timeout_keep_alive=75, timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive(), 60, "the API")
        assert server.started
        yield chosen
    finally:
        server.should_exit = True
        thread.join(60)
        shutil.rmtree(folder)
        assert not thread.is_alive()


def headers(settings: Settings) -> dict[str, str]:
    """Those of the local admin."""
    return {"Authorization": f"Bearer {settings.token_file.read_text().strip()}"}


def plain(settings: Settings, **more: str) -> httpx.Client:
    """Plain HTTP to a served API, as its local admin."""
    return httpx.Client(base_url=settings.api_url, headers=headers(settings) | more, trust_env=False, timeout=60)
