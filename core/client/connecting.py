"""Finding the running Harli, or starting one."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from core.client.progress import message_progress
from core.client.synchronous import Client
from core.config import Settings
from core.errors import HarliError, Unavailable

_TAIL_BYTES = 2000


def connect(url: str | None = None, *, token: str | Path | None = None, start: bool = False) -> Client:
    """A client of the running Harli: of `url`, or of the address that the settings name. `token` as for `Client`.

    With `start`, one is started at that address when none runs there (as `harli up` does; it runs on when this program
    ends, until `harli down`), and its engine is waited for. Raises Unavailable, with what to do, when no API answers.
    """
    ours = Settings().api_url
    client = Client(url or ours, token=token)
    try:
        if not start:
            client.health()
        elif client.base_url != ours:
            client.health()
            client.wait_for_engine()
        else:
            _start(client)
    except BaseException:
        client.close()
        raise
    return client


def _start(client: Client) -> None:
    """Attach to what runs, or start it; back when the engine serves."""
    show = message_progress()
    process: subprocess.Popen[bytes] | None = None
    log = Settings().data_dir.expanduser() / "logs" / "up.log"
    while True:
        try:
            if (engine := client.engine()).state == "ready":
                show(f"{engine.model} is served at {client.base_url}")
                return
        except HarliError as error:
            if not isinstance(error, Unavailable) and process is None:
                raise
            process = process or _up(log)
        if process is not None and process.poll() is not None:
            raise Unavailable("start_failed", f"`harli up` ended: {_tail(log)}; `harli doctor` says more")
        said = _tail(log).splitlines() if process is not None else []
        show(f"starting: {said[-1]}" if said else "waiting for the engine")
        time.sleep(0.5)


def _up(log: Path) -> subprocess.Popen[bytes]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "core.cli", "up"],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _tail(log: Path) -> str:
    return log.read_bytes()[-_TAIL_BYTES:].decode("utf-8", "replace").strip() if log.exists() else ""
