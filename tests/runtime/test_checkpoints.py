"""When a job writes checkpoints."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from core.finetune import checkpoint
from core.link.messages import JobUpdate, StopJob
from tests.runtime.test_runtime import Bench, bench  # noqa: F401


def test_a_checkpoint_waits_for_the_one_before_it_to_be_written(
    bench: Bench,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk, begun, write = threading.Event(), list[int](), checkpoint.write

    def slow(folder: Path, progress: Any, *more: Any) -> Path:
        begun.append(progress.step)
        assert disk.wait(30)
        return write(folder, progress, *more)

    monkeypatch.setattr(checkpoint, "write", slow)
    bench.start(max_steps=500, checkpoint_every=1)
    bench.until(lambda m: isinstance(m, JobUpdate) and m.kind == "metric" and (m.step or 0) >= 6)
    assert begun == [1]
    disk.set()
    first, second = bench.update("checkpoint"), bench.update("checkpoint")
    assert first.step == 1
    assert second.step is not None and second.step >= 6
    bench.send(StopJob(job_id="job", token=1))
    bench.update("cancelled")
