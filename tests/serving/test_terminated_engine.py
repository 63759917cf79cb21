"""The engine is asked to end: the last file of the room, so that no other test has to start it again."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from core.link.messages import Goodbye
from tests.serving.conftest import Engine
from tests.serving.test_engine import spec

pytestmark = pytest.mark.engine


def test_sigterm_checkpoints_the_job_and_leaves_no_process(engine: Engine, captain: Path, tmp_path: Path) -> None:
    job = spec(captain, tmp_path / "terminated", max_steps=5000)
    engine.run(job, token=21)
    engine.update("metric", job.job_id)
    children = psutil.Process(engine.process.pid).children(recursive=True)
    assert engine.stop() == 0
    interrupted = engine.update("interrupted", job.job_id)
    assert interrupted.path is not None and (Path(interrupted.path) / "optimizer.safetensors").exists()
    engine.until(lambda m: isinstance(m, Goodbye))
    assert psutil.wait_procs(children, timeout=60)[1] == []
