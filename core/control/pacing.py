"""Interval jobs that keep their pace when the machine's clock is set.

APScheduler goes by the wall clock: set back an hour it runs nothing for an hour, and after a machine has slept for days
it counts every single run that was missed.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime

from apscheduler.jobstores.base import JobLookupError
from apscheduler.schedulers.background import BackgroundScheduler

# The clock may be set while the scheduler's thread sleeps, or works out for how long: it looks again so soon.
_LOOK_S = 1.0


class PacedScheduler(BackgroundScheduler):  # type: ignore[misc]
    """For interval jobs only. One whose next run is more than its interval away, before or behind, is due: no clock
    that is left alone brings it there."""

    def _process_jobs(self) -> float | None:
        now = datetime.now(self.timezone)
        for job in self.get_jobs():
            if abs(job.next_run_time - now) > job.trigger.interval:
                with suppress(JobLookupError):  # taken away meanwhile
                    job.modify(next_run_time=now)
        wait: float | None = super()._process_jobs()
        return None if wait is None else min(wait, _LOOK_S)
