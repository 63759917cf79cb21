"""The last safety net of `harli up`: ends the parts' process groups when the supervisor itself was killed.

``python -m core.reaper GRACE_S STATE_FILE`` reads lines ``+GROUP`` and ``-GROUP`` on standard input. When the input
ends, the groups that are still listed lost their supervisor: each leader is asked to stop, gets GRACE_S seconds, then
its whole group is killed, and the state file, which no longer holds, is removed. Until all of them are gone it keeps
the data directory's lock, of which it has inherited the file. Standard library only: it lives as long as Harli does and
should weigh little.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_KILLED_S = 10.0  # how long a killed group may take to be gone


def listed(lines: Iterable[str]) -> set[int]:
    """The groups that were added and not taken off when the input ended."""
    groups: set[int] = set()
    for line in lines:
        sign, group = line[0], int(line[1:])
        if sign == "+":
            groups.add(group)
        else:
            groups.discard(group)
    return groups


def end_groups(groups: set[int], grace_s: float) -> None:
    """SIGTERM to the leaders; after `grace_s`, or sooner when all have gone, SIGKILL to whatever the groups hold. Back
    when that is gone, and with it its ports and GPU memory are free."""
    for group in groups:
        with suppress(ProcessLookupError):
            os.kill(group, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and any(_group_of(group) is not None for group in groups):
        time.sleep(0.1)
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    deadline = time.monotonic() + _KILLED_S
    while time.monotonic() < deadline and groups & _living_groups():
        time.sleep(0.1)


def _living_groups() -> set[int | None]:
    return {_group_of(int(folder.name)) for folder in Path("/proc").iterdir() if folder.name.isdigit()}


def _group_of(process: int) -> int | None:
    """The group of a process that runs; one that ended and was not collected does not."""
    try:
        state, _, group = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:3]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else int(group)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    grace_s, state_file = float(sys.argv[1]), Path(sys.argv[2])
    groups = listed(sys.stdin)
    if groups:
        end_groups(groups, grace_s)
        state_file.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
