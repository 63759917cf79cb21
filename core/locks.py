"""Files that are locked by processes: the kernel lets go of a lock when its process ends, however it ends."""

from __future__ import annotations

import fcntl
from typing import IO


def is_held(file: IO[str]) -> bool:
    """Whether somebody else has locked an open file for itself. Raises `OSError` where the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
