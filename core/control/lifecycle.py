"""The life cycle of a job: which transitions there are, and the one way to make one.

queued → starting → running ⇄ paused → saving → succeeded; or failed, cancelled, interrupted (resumable). A job that is
resumed goes through the queue: running it again is the dispatcher's to decide.
"""

from __future__ import annotations

from sqlalchemy.orm import Session

from core.control import webhooks
from core.errors import Conflict
from db import changes
from db.base import now
from db.jobs import TERMINAL, JobEventRecord, JobLogRecord, JobRecord

TRANSITIONS: dict[str, frozenset[str]] = {
    "queued": frozenset({"starting", "paused", "failed", "cancelled"}),
    "starting": frozenset({"running", "paused", "saving", "failed", "cancelled", "interrupted"}),
    "running": frozenset({"paused", "saving", "failed", "cancelled", "interrupted"}),
    "paused": frozenset({"queued", "saving", "cancelled"}),
    "saving": frozenset({"succeeded", "failed", "cancelled", "interrupted"}),
    # running: the engine came back and never stopped working on it.
    "interrupted": frozenset({"queued", "starting", "running", "paused", "saving", "failed", "cancelled"}),
    **{state: frozenset() for state in TERMINAL},
}


def transition(session: Session, job: JobRecord, state: str, kind: str, message: str = "") -> None:
    """Move a job on: its state, the event, a line of its log and the notification are written in the caller's
    transaction.

    Raises Conflict, naming the state and what it allows, for a transition that does not exist.
    """
    if state not in TRANSITIONS[job.state]:
        allowed = ", ".join(sorted(TRANSITIONS[job.state])) or "nothing: it has ended"
        raise Conflict("job_state", f"job {job.id} is {job.state}; from there it can become {allowed}", "state")
    time = now()
    session.add(
        JobEventRecord(
            job_id=job.id, time=time, kind=kind, from_state=job.state, to_state=state, token=job.token, message=message
        )
    )
    session.add(JobLogRecord(job_id=job.id, time=time, message=f"{state}: {message}" if message else state))
    job.state = state
    job.state_since = time
    if state == "starting" and job.started_at is None:
        job.started_at = time
    if state in TERMINAL:
        job.ended_at = time
    if state in (*TERMINAL, "paused", "queued"):
        job.command = job.command_at = None
    if state in (*TERMINAL, "queued"):
        job.held = False
    if state not in ("starting", "running", "saving", "interrupted"):
        # No engine holds it any more: what one might still say is stale.
        job.token = job.engine_id = None
    changes.add(session, "jobs", kind, job.id, tenant=job.tenant, state=state)
    webhooks.tell(session, job, kind, message)


def remark(session: Session, job: JobRecord, kind: str, message: str) -> None:
    """Note something that is no transition among the job's events."""
    time = now()
    session.add(JobEventRecord(job_id=job.id, time=time, kind=kind, token=job.token, message=message))
    session.add(JobLogRecord(job_id=job.id, time=time, message=message))
    changes.add(session, "jobs", kind, job.id, tenant=job.tenant, state=job.state)
    webhooks.tell(session, job, kind, message)
