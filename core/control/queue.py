"""The order in which jobs run, and how it is changed by hand."""

from __future__ import annotations

from typing import Literal

from core.api import schemas
from core.control.context import Control
from core.control.jobs import require, views
from core.control.lifecycle import remark
from core.errors import Conflict
from db import changes
from db import jobs as rows
from db.jobs import IN_ENGINE

_WAITING = ("queued", "interrupted")


def order(control: Control, limit: int) -> list[schemas.Job]:
    """The job that an engine holds, then the first waiting ones as they will be handed out; those that the caller
    sees."""
    with control.store.read() as session:
        return views(session, [*rows.in_states(session, IN_ENGINE), *rows.in_states(session, _WAITING)][:limit])


def move(control: Control, job_id: str, to: Literal["up", "down", "top", "bottom"]) -> schemas.Job:
    """Move a job among the waiting ones that the caller sees. The places that these have, priorities included, are
    dealt out anew in their new order: every other job stays where it was."""
    with control.store.write() as session:
        job = require(session, job_id)
        queue = rows.in_states(session, _WAITING)
        if job not in queue:
            raise Conflict(
                "job_state", f"job {job.id} is {job.state}; only a job that waits has a place in the queue", "job_id"
            )
        places = [(other.priority, other.place if other.place is not None else float(other.seq)) for other in queue]
        at = queue.index(job)
        goal = {"up": max(at - 1, 0), "down": min(at + 1, len(queue) - 1), "top": 0, "bottom": len(queue) - 1}[to]
        if goal != at:
            queue.insert(goal, queue.pop(at))
            for other, (priority, place) in zip(queue, places, strict=True):
                if other.priority != priority and other is not job:
                    remark(session, other, "priority", f"priority {other.priority} → {priority}, with its place")
                other.priority, other.place = priority, place
            remark(session, job, "moved", f"moved to place {goal + 1} of {len(queue)} waiting jobs")
            changes.add(session, "jobs", "reordered", None, tenant=job.tenant)
        session.flush()
        return views(session, [job])[0]
