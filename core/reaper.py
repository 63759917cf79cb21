"""The last safety net of `harli up`: ends the parts' process groups when the supervisor itself was killed.

``python -m core.reaper GRACE_S STATE_FILE`` reads lines ``+GROUP`` and ``-GROUP`` on standard input. When the input
ends, the groups that are still listed lost their supervisor: each leader is asked to stop, gets GRACE_S seconds, then
its whole group is killed, and the state file, which no longer holds, is removed. Standard library only: it lives as
long as Harli does and should weigh little.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


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
    """SIGTERM to the leaders; after `grace_s`, or sooner when all have gone, SIGKILL to whatever the groups hold."""
    for group in groups:
        with suppress(ProcessLookupError):
            os.kill(group, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and any(_leader_lives(group) for group in groups):
        time.sleep(0.1)
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def _leader_lives(group: int) -> bool:
    """Whether the group's leader runs; one that ended and was not collected does not."""
    try:
        state = Path(f"/proc/{group}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


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
