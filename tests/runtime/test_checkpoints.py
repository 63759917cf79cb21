"""When a job writes checkpoints."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from core.finetune import checkpoint
from core.intake import adapter
from core.link.messages import JobUpdate, StopJob
from core.runtime import job
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


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While it is set, the disk has no room for checkpoints and adapters: they go to the kernel's own full device."""
    full, write, normalise = threading.Event(), checkpoint.write, adapter.normalise
    full.set()

    def use_up() -> None:
        if full.is_set():
            Path("/dev/full").write_bytes(b"x")

    def write_if_room(*what: Any) -> Path:
        use_up()
        return write(*what)

    def normalise_if_room(folder: Path) -> Any:
        use_up()
        return normalise(folder)

    monkeypatch.setattr(checkpoint, "write", write_if_room)
    monkeypatch.setattr(adapter, "normalise", normalise_if_room)
    monkeypatch.setattr(job, "_TRY_AGAIN_S", 0.05)
    return full


def test_what_a_full_disk_has_no_room_for_is_written_once_it_has(
    bench: Bench,  # noqa: F811
    full: threading.Event,
) -> None:
    bench.start(max_steps=8, checkpoint_every=2)
    said = bench.update("log").message or ""
    assert "the checkpoint of step 2 is not written yet" in said
    assert "free some of it" in said
    bench.update("saving")
    assert not [m for m in bench.received if isinstance(m, JobUpdate) and m.kind in ("checkpoint", "failed")]
    full.clear()
    assert bench.update("checkpoint").step == 2
    done = bench.update("succeeded")
    assert (Path(done.path or "") / "adapter_model.safetensors").exists()
    assert len([m for m in bench.received if isinstance(m, JobUpdate) and m.kind == "log"]) == 1


def test_a_job_waits_when_too_much_of_it_waits_for_the_disk(
    bench: Bench,  # noqa: F811
    full: threading.Event,
) -> None:
    bench.start(max_steps=40, evaluate_every=1, evaluation_fraction=0.25, sample=True)

    def evaluated() -> int:
        return sum(isinstance(m, JobUpdate) and m.eval_loss is not None for m in bench.received)

    def go_on(seconds: float) -> int:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            bench.idle()
            bench.drain()
            time.sleep(0.001)
        return evaluated()

    bench.update("log")
    before = go_on(1.0)
    assert go_on(1.0) == before < 40
    full.clear()
    bench.update("succeeded")
    assert evaluated() == 40


def test_a_full_disk_holds_up_neither_the_engines_end_nor_a_cancelled_job(
    bench: Bench,  # noqa: F811
    full: threading.Event,
) -> None:
    bench.start(max_steps=500, checkpoint_every=2)
    bench.update("log")
    bench.send(StopJob(job_id="job", token=1))
    bench.update("cancelled")
    bench.start(max_steps=500, checkpoint_every=2, token=2)
    bench.update("log")
    bench.runtime.close()
    bench.drain()
    left = [m for m in bench.received if isinstance(m, JobUpdate)][-1]
    assert (left.kind, left.path, left.token) == ("interrupted", None, 2)
    assert not list(bench.output.rglob("*.partial"))
