"""`harli down` ends the supervisor that holds the data directory, and no one else."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from core import supervise
from core.errors import NotFound


def test_without_a_supervisor_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no `harli up` runs"):
        supervise.down(tmp_path)
    with supervise.hold(tmp_path):
        pass
    with pytest.raises(NotFound, match="no `harli up` runs"):
        supervise.down(tmp_path)


def test_it_asks_the_holder_to_end_and_waits_until_it_has(tmp_path: Path) -> None:
    asked = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda _number, _frame: asked.set())
    ended: list[bool] = []
    try:
        with supervise.hold(tmp_path):
            assert (tmp_path / "run" / "up.lock").read_text() == str(os.getpid())
            stopper = threading.Thread(target=lambda: (supervise.down(tmp_path), ended.append(True)))
            stopper.start()
            while not asked.is_set():
                signal.sigtimedwait([], 0.05)
            assert ended == []
        stopper.join(60)
        assert ended == [True]
    finally:
        signal.signal(signal.SIGTERM, before)
