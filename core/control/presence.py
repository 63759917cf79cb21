"""Which API processes of this machine still run. Each that asks for its `name` holds a lock on a file of that name in
the data directory: the kernel lets go of it when the process ends, however it ends, and never while it merely stands
still.

Files are kept apart by the host's name: not every shared file system tells one machine of another's locks.
"""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO

from core import locks
from core.control.context import new_id

_lock = threading.Lock()
# By data directory: this process's name there, and the file that stays open for as long as it runs.
_own: dict[Path, tuple[str, IO[str] | None]] = {}


def name(data_dir: Path) -> str:
    """This process's among all that ever used the data directory; from now on others see that it runs."""
    with _lock:
        if data_dir not in _own:
            made = new_id(f"{socket.gethostname()[:60]}-{os.getpid()}")
            _own[data_dir] = made, _held(data_dir, made)
        return _own[data_dir][0]


def _held(data_dir: Path, made: str) -> IO[str] | None:
    """The locked file, which nobody ever sees unlocked while it is held; None where that cannot be had."""
    folder = _folder(data_dir)
    unseen = data_dir / "uploads" / made  # from where it goes with other leftovers, should this process end here
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        file = unseen.open("w")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unseen.rename(folder / made)
        return file
    return None


def runs(data_dir: Path, process: str) -> bool | None:
    """Whether the process of this name runs; None for one of another machine, and where it cannot be told."""
    try:
        with (_folder(data_dir) / process).open() as file:
            return locks.is_held(file)
    except OSError:
        return None


def ended(data_dir: Path) -> list[str]:
    """The processes of this machine that have ended and are not forgotten."""
    with suppress(FileNotFoundError):
        return [file.name for file in _folder(data_dir).iterdir() if runs(data_dir, file.name) is False]
    return []


def forget(data_dir: Path, processes: Iterable[str]) -> None:
    """Of processes that have ended: from now on `runs` tells nothing of them."""
    for process in processes:
        (_folder(data_dir) / process).unlink(missing_ok=True)


def _folder(data_dir: Path) -> Path:
    return data_dir / "run" / "processes" / socket.gethostname()
