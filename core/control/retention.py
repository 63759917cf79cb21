"""Forgetting jobs that ended long ago, where the settings say so; what they made stays."""

from __future__ import annotations

from datetime import timedelta

from core.control import jobs
from core.control.context import Control
from core.errors import HarliError
from db import jobs as rows
from db.base import now

# At a time; the next call goes on.
_AT_ONCE = 200


def forget_old_jobs(control: Control) -> None:
    """Delete the oldest of those that ended before the limit, with their events, figures, logs and folders."""
    days = control.settings.job_retention_days
    if days is None:
        return
    with control.store.read() as session:
        old = [job.id for job in rows.ended_before(session, now() - timedelta(days=days), _AT_ONCE)]
    for job_id in old:
        try:
            jobs.delete(control, job_id)
        except HarliError:  # someone else was faster
            continue
