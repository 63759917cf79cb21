"""What no row names and no one needs is deleted, and nothing else."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from core.api import schemas
from core.control import adapters, jobs, leftovers
from core.control.context import Control
from db import jobs as rows
from db.base import now
from tests.control import files

Submit = Callable[..., schemas.Job]


def aged(path: Path) -> Path:
    """Made a day ago."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    os.utime(path, (time.time() - 86400,) * 2)
    return path


def test_what_a_crash_left_goes_after_hours_and_what_is_named_stays(
    control: Control, dataset: schemas.Dataset, tmp_path: Path
) -> None:
    adapters.upload(control, files.adapter(tmp_path / "captain"), "captain", False)
    kept = [aged(control.dataset_file(dataset.id)), aged(control.adapter_folder("captain", 1))]
    fresh = [control.uploads / "coming", control.dataset_file("ds-coming")]
    for path in fresh:
        path.write_text("x")
    gone = [aged(control.uploads / "broken"), aged(control.dataset_file("ds-none"))]
    orphan = control.adapter_folder("captain", 2)
    orphan.mkdir()
    gone.append(aged(orphan))
    leftovers.remove(control)
    assert [path for path in (*kept, *fresh) if not path.exists()] == []
    assert [path for path in gone if path.exists()] == []


def test_checkpoints_go_a_day_after_their_job_has_ended(control: Control, submit: Submit) -> None:
    old, recent, open_ = submit("a"), submit("b"), submit("c")
    for job in (old, recent, open_):
        files.checkpoint(control.job_folder(job.id), 10)
    for job in (old, recent):
        jobs.stop(control, job.id, save=False)
    with control.store.write() as session:
        record = rows.find(session, old.id)
        assert record is not None
        record.ended_at = now() - timedelta(days=2)
    leftovers.remove(control)
    assert [control.job_folder(job.id).exists() for job in (old, recent, open_)] == [False, True, True]
