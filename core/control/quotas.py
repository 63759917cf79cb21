"""What tenants may use of finetuning: tokens a day, jobs that run and jobs that wait, and how far ahead of others their
jobs may go. The day is UTC's."""

from __future__ import annotations

from sqlalchemy.orm import Session

from core.api.job_schemas import Quota, QuotaUpdate
from core.control.context import Control
from core.control.principal import NOBODY
from core.errors import Conflict, Invalid, NotFound
from db import jobs as job_rows
from db import quotas as rows
from db import tenants
from db.base import now
from db.jobs import IN_ENGINE
from db.quotas import QuotaRecord
from db.scope import DEFAULT_TENANT

NORMAL_PRIORITY, HIGHEST_PRIORITY = 0, 100
_WAITING = ("queued", "interrupted")


def get(control: Control, tenant: str) -> Quota:
    with control.store.read() as session:
        _require(session, control, tenant)
        return view(session, tenant)


def put(control: Control, tenant: str, update: QuotaUpdate) -> Quota:
    """Set all of a tenant's limits. For the platform's own admins; a tenant does not raise its limits itself."""
    control.principal.require_platform("admin")
    with control.store.write() as session:
        _require(session, control, tenant)
        record = rows.of(session, tenant)
        if record is None:
            record = QuotaRecord(tenant=tenant)
            session.add(record)
        for name, value in update.model_dump().items():
            setattr(record, name, value)
        session.flush()
        return view(session, tenant)


def view(session: Session, tenant: str) -> Quota:
    record = rows.of(session, tenant)
    return Quota(
        tenant=tenant,
        finetune_tokens_day=record.finetune_tokens_day if record is not None else None,
        running_jobs=record.running_jobs if record is not None else None,
        waiting_jobs=record.waiting_jobs if record is not None else None,
        max_priority=_max_priority(record, tenant),
        tokens_today=rows.used(session, tenant, now().date()),
        running_now=job_rows.count(session, tenant, IN_ENGINE),
        waiting_now=job_rows.count(session, tenant, _WAITING),
    )


def _require(session: Session, control: Control, tenant: str) -> None:
    """One that there is, and that is the caller's to see."""
    who = control.principal
    mine = who is not NOBODY and (who.is_platform or who.tenant == tenant)
    if not mine or tenants.find(session, tenant) is None:
        raise NotFound("tenant_not_found", f"there is no tenant {tenant}", "tenant")


def check_waiting(session: Session, tenant: str) -> None:
    """Raise Conflict when the tenant's queue is full."""
    record = rows.of(session, tenant)
    if record is None or record.waiting_jobs is None:
        return
    waiting = job_rows.count(session, tenant, _WAITING)
    if waiting >= record.waiting_jobs:
        raise Conflict(
            "quota_waiting_jobs",
            f"tenant {tenant} has {waiting} waiting jobs and may have {record.waiting_jobs}; wait for one to start, "
            "stop one, or ask the platform for a larger quota",
        )


def check_priority(session: Session, control: Control, tenant: str, priority: int) -> None:
    """Raise Invalid when the caller may not give a tenant's job this priority. The platform's admins may give any."""
    if control.principal.is_platform_admin:
        return
    most = _max_priority(rows.of(session, tenant), tenant)
    if priority > most:
        raise Invalid(
            "priority_too_high",
            f"priority is {priority} and tenant {tenant} may give its jobs up to {most}; lower it, or ask the platform "
            f"for a larger quota (`harli quota {tenant} --max-priority {priority}`)",
            "priority",
        )


def _max_priority(record: QuotaRecord | None, tenant: str) -> int:
    """Tenants' jobs do not go before each other's by their own word; those who run the platform put theirs anywhere."""
    if record is not None and record.max_priority is not None:
        return record.max_priority
    return HIGHEST_PRIORITY if tenant == DEFAULT_TENANT else NORMAL_PRIORITY


def reasons(session: Session) -> dict[str, str]:
    """The tenants whose jobs may not run now, each with the reason."""
    found: dict[str, str] = {}
    today = now().date()
    for record in rows.everything(session):
        used = rows.used(session, record.tenant, today) if record.finetune_tokens_day is not None else 0
        running = job_rows.count(session, record.tenant, IN_ENGINE) if record.running_jobs is not None else 0
        if record.finetune_tokens_day is not None and used >= record.finetune_tokens_day:
            found[record.tenant] = (
                f"the tenant's {record.finetune_tokens_day:,} finetuning tokens of today are used up ({used:,}); it "
                "goes on after midnight UTC, or with a larger quota"
            )
        elif record.running_jobs is not None and running >= record.running_jobs:
            found[record.tenant] = (
                f"the tenant may run {record.running_jobs} jobs at a time and runs {running}; it starts when one ends"
            )
    return found


def exhausted(session: Session, tenant: str) -> str | None:
    """Why a job of the tenant that runs must stand back; None when it need not."""
    record = rows.of(session, tenant)
    if record is None or record.finetune_tokens_day is None:
        return None
    used = rows.used(session, tenant, now().date())
    if used < record.finetune_tokens_day:
        return None
    return f"the tenant's {record.finetune_tokens_day:,} finetuning tokens of today are used up ({used:,})"
