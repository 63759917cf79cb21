"""Why a job is where it is and when it will be through, in words, from what the store and the engine's reports say."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy.orm import Session

from core.api.job_schemas import JobAhead, JobOutlook, Speed
from core.control import engines, quotas, speed
from core.control.context import Control
from core.control.estimates import end_after, tokens_left
from core.control.jobs import MAX_STALLS, require
from core.control.lifecycle import remark
from db import jobs as rows
from db import telemetry
from db.base import now
from db.engines import EngineRecord
from db.jobs import IN_ENGINE, TERMINAL, JobRecord
from db.scope import sees

_QUEUE = ("queued", "interrupted")
_FRESH = timedelta(seconds=3)
# Below this share of the speed without decode it is worth saying what decode leaves.
_SLOWED = 0.9


def of(control: Control, job_id: str) -> JobOutlook:
    with control.store.read() as session:
        return _of(session, require(session, job_id))


def _of(session: Session, job: JobRecord) -> JobOutlook:
    measured = speed.measured(session) if job.state not in TERMINAL else None
    left = _seconds(job, measured)
    outlook = JobOutlook(
        job_id=job.id, state=job.state, headline=job.state, speed=measured, seconds_left=left, deadline=job.deadline
    )
    if job.state in TERMINAL:
        outlook.headline = _ended(job)
    elif job.state in IN_ENGINE:
        outlook.headline, outlook.reasons = _in_engine(session, job, measured)
        outlook.eta = end_after(left) if left is not None else None
    elif job.state == "paused":
        outlook.headline, outlook.reasons = _paused(session, job)
    else:
        _waiting(session, job, outlook)
    if job.state in ("running", *_QUEUE) and measured is None:
        outlook.reasons.append("when it ends is not known: no finetuning speed has been measured on this engine yet")
    _judge(outlook)
    return outlook


def _seconds(job: JobRecord, measured: Speed | None) -> float | None:
    """Of training that a job has left; None when its length or the speed is not known."""
    left = tokens_left(job)
    return left / measured.tokens_s if left is not None and measured is not None else None


def _judge(outlook: JobOutlook) -> None:
    """Say so when the deadline will not be kept."""
    end = outlook.eta if outlook.state not in TERMINAL else None
    if outlook.deadline is None or outlook.state in TERMINAL:
        return
    if now() > outlook.deadline:
        outlook.late = True
        outlook.reasons.insert(0, f"its deadline, {_clock(outlook.deadline)}, is past")
    elif end is not None and end > outlook.deadline:
        outlook.late = True
        by = _span((end - outlook.deadline).total_seconds())
        outlook.reasons.insert(0, f"at the present speed it ends {by} after its deadline, {_clock(outlook.deadline)}")


# ---- by state --------------------------------------------------------------------------------------------------------


def _ended(job: JobRecord) -> str:
    if job.error is not None:
        return f"it failed: {job.error['message']}"
    return {"succeeded": "it is through", "cancelled": "it was stopped"}.get(job.state, job.state)


def _in_engine(session: Session, job: JobRecord, measured: Speed | None) -> tuple[str, list[str]]:
    if job.state == "starting":
        since = _span((now() - job.state_since).total_seconds())
        return "the engine reads and tokenises the data set", [f"it has been at it for {since}"]
    if job.state == "saving":
        return "the adapter is being written and stored", []
    reasons = []
    point = _latest(session)
    if point is None:
        reasons.append("the engine has reported no figures in the last seconds")
    elif point["paused_reason"]:
        return "finetuning stands still for the moment", [point["paused_reason"]]
    elif point["finetune_tokens_s"] > 0 or point["plan_reason"]:
        reasons.append(
            f"it trains {point['finetune_tokens_s']:,.0f} tokens/s now; the planner says: {point['plan_reason']}"
            if point["plan_reason"]
            else f"it trains {point['finetune_tokens_s']:,.0f} tokens/s now"
        )
    if measured is not None and measured.alone_tokens_s is not None:
        share = measured.tokens_s / measured.alone_tokens_s
        if share < _SLOWED:
            reasons.append(
                f"decode and its latency targets leave it {share:.0%} of the speed without requests "
                f"({measured.tokens_s:,.0f} of {measured.alone_tokens_s:,.0f} tokens/s); a looser target, or fewer "
                "requests, make it faster"
            )
    return "the engine trains it", reasons


def _paused(session: Session, job: JobRecord) -> tuple[str, list[str]]:
    if not job.held:
        return "it is paused", ["resume it to put it back in the queue"]
    why = quotas.reasons(session).get(job.tenant)
    return "it stands back for its tenant's quota and goes on by itself", [why] if why else []


def _waiting(session: Session, job: JobRecord, outlook: JobOutlook) -> None:
    blocked = quotas.reasons(session)
    if job.state == "interrupted" and job.stalls >= MAX_STALLS:
        outlook.headline = "it is not started again by itself"
        outlook.reasons.append(
            f"it was interrupted {job.stalls} times in a row without getting to a new checkpoint; see its events, and "
            "resume it by hand once the cause is gone"
        )
        return
    before = [*rows.in_states(session, IN_ENGINE, everyones=True), *_before(session, job, blocked)]
    outlook.ahead = [_ahead(session, other, outlook.speed) for other in before]
    outlook.position = sum(other.state in _QUEUE for other in before) + 1
    outlook.headline, reason = _why_waiting(engines.known(session), before, job, session, blocked)
    outlook.reasons.append(reason)
    waits = [other.seconds_left for other in outlook.ahead]
    if job.tenant not in blocked and outlook.seconds_left is not None and None not in waits:
        total = sum(seconds for seconds in waits if seconds is not None) + outlook.seconds_left
        outlook.eta = end_after(total)


def _before(session: Session, job: JobRecord, blocked: dict[str, str]) -> list[JobRecord]:
    """The waiting jobs that are handed out first."""
    queue = [
        other
        for other in rows.in_states(session, _QUEUE, everyones=True)
        if other.stalls < MAX_STALLS and (other.id == job.id or other.tenant not in blocked)
    ]
    return queue[: next((n for n, other in enumerate(queue) if other.id == job.id), len(queue))]


def _ahead(session: Session, job: JobRecord, measured: Speed | None) -> JobAhead:
    shown = sees(session, job.tenant)
    return JobAhead(
        id=job.id if shown else None,
        name=job.name if shown else None,
        state=job.state,
        seconds_left=_seconds(job, measured),
    )


def _why_waiting(
    engine: EngineRecord | None,
    before: Sequence[JobRecord],
    job: JobRecord,
    session: Session,
    blocked: dict[str, str],
) -> tuple[str, str]:
    if engine is None or engine.state == "gone":
        return "no engine is connected", "it starts when one is; `harli doctor` and the Overview page tell more"
    if engine.state == "lost":
        return "the engine does not answer", "it starts when the engine is back; see the engine's log"
    if job.tenant in blocked:
        return "its tenant's quota holds it back", blocked[job.tenant]
    held = [other for other in before if other.state in IN_ENGINE]
    if held:
        name = f"job {held[0].id} ({held[0].name})" if sees(session, held[0].tenant) else "a job of another tenant"
        waiting = len(before) - len(held)
        others = f", and {waiting} waiting {'job goes' if waiting == 1 else 'jobs go'} before it" if waiting else ""
        return "another job runs", f"{name} is {held[0].state}; one job runs at a time{others}"
    if before:
        return "other jobs go first", f"{len(before)} of a higher priority, or older, are before it"
    return "it is next", "it starts within a moment"


def _latest(session: Session) -> dict[str, Any] | None:
    """The engine's newest second."""
    time = now()
    found = telemetry.points(session, 1, time - _FRESH, time)
    return found[-1][2] if found else None


# ---- deadlines -------------------------------------------------------------------------------------------------------


def warn_of_deadlines(session: Session) -> None:
    """Note, once, of each job that will not keep its deadline."""
    for job in rows.with_deadline(session):
        outlook = _of(session, job)
        if outlook.late and not job.deadline_warned:
            job.deadline_warned = True
            remark(session, job, "deadline_at_risk", outlook.reasons[0])
        elif not outlook.late and job.deadline_warned:
            job.deadline_warned = False


def _span(seconds: float) -> str:
    """``45 s``, ``12 min``, ``3.5 h``."""
    if seconds < 90:
        return f"{max(seconds, 0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _clock(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M} UTC"
