"""Files that no row names any more, or that no one needs: what a crash left between file and commit, ended jobs'
checkpoints."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.control.context import Control
from db import jobs as job_rows
from db.adapters import AdapterVersionRecord
from db.base import now
from db.datasets import DatasetRecord
from db.jobs import TERMINAL

# Longer than any request takes, so that what one is about to name is not taken from it.
_UNNAMED_S = 6 * 3600.0
# A failed job's checkpoints can be looked at for a while; a stopped one's engine may take a moment to let go of them.
_ENDED = timedelta(days=1)


def remove(control: Control) -> None:
    """Delete them."""
    with control.store.read() as session:
        doomed = [*_unnamed(control, session), *_ended_jobs(control, session, now())]
    for path in doomed:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _unnamed(control: Control, session: Session) -> Iterator[Path]:
    named = {control.dataset_file(dataset_id) for dataset_id in session.scalars(select(DatasetRecord.id))}
    versions = session.execute(select(AdapterVersionRecord.name, AdapterVersionRecord.version))
    named |= {control.adapter_folder(name, version) for name, version in versions}
    limit = time.time() - _UNNAMED_S
    for pattern in ("uploads/*", "datasets/*", "adapters/*/*"):
        yield from (path for path in control.data_dir.glob(pattern) if path not in named and _age(path) < limit)


def _ended_jobs(control: Control, session: Session, time_: datetime) -> Iterator[Path]:
    for folder in control.data_dir.glob("jobs/*"):
        job = job_rows.find(session, folder.name)
        if job is not None and job.state in TERMINAL and job.ended_at is not None and job.ended_at < time_ - _ENDED:
            yield folder


def _age(path: Path) -> float:
    """When it was changed last, Unix seconds; now for what has just gone."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return time.time()
