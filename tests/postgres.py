"""A PostgreSQL server of the tests' own: a new cluster in a temporary folder, reached over a Unix socket."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests import machine


def _account() -> dict[str, Any]:
    """PostgreSQL refuses to run as root."""
    if os.getuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    raise RuntimeError("there is neither a user postgres nor nobody to run PostgreSQL as")


@contextlib.contextmanager
def server() -> Iterator[str]:
    """A running server; yields its socket folder, which is the `host` of a connection."""
    folder = machine.postgres()
    assert folder is not None
    account = _account()
    base = Path(tempfile.mkdtemp(prefix="hpg"))
    process = None
    try:
        if account:
            os.chown(base, account["user"], account["group"])
        # C.UTF-8 keeps the cluster independent of the machine's locale.
        create = [folder / "initdb", "-D", base / "data", "-U", "harli", "-A", "trust", "-N", "--locale=C.UTF-8"]
        subprocess.run(create, check=True, capture_output=True, cwd=base, **account)
        start = [folder / "postgres", "-D", base / "data", "-k", base, "-c", "listen_addresses=", "-c", "fsync=off"]
        log = (base / "log").open("wb")
        process = subprocess.Popen(start, stdout=log, stderr=log, cwd=base, **account)
        ready = [folder / "pg_isready", "-h", base, "-U", "harli"]
        deadline = time.monotonic() + 30
        while subprocess.run(ready, check=False, capture_output=True).returncode:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL did not start: {(base / 'log').read_text()}")
            time.sleep(0.05)
        yield str(base)
    finally:
        if process is not None:
            process.terminate()
            process.wait(30)
        shutil.rmtree(base, ignore_errors=True)
