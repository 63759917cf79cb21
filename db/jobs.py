"""Jobs, and what is kept of each: events, metrics, log lines."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Executable,
    ForeignKey,
    Index,
    Integer,
    Row,
    Select,
    String,
    Text,
    and_,
    bindparam,
    cast,
    delete,
    func,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.orm import Mapped, Session, mapped_column

from db import touched
from db.base import Base, BigId, upsert
from db.scope import Owned, all_tenants, only

STATES = ("queued", "starting", "running", "paused", "saving", "succeeded", "failed", "cancelled", "interrupted")
TERMINAL = ("succeeded", "failed", "cancelled")
IN_ENGINE = ("starting", "running", "saving")
_KEPT_LOG_LINES = 20_000


class JobRecord(Owned, Base):
    """`seq` is the order of submission.

    `command` is what someone asked of a job that the engine holds (pause, stop, save: stop with saving) until that is
    done. `token` is the fencing token under which the job was handed to `engine_id` last; what an engine reports under
    another one is dropped. `resumes` counts hand-outs after the first, `stalls` those in a row that were interrupted
    without a new checkpoint, `start_step` is where the last one began. `place` orders jobs of one priority for those
    that were moved, `seq` the others. `expected_tokens`: what it will train on, padding not counted; `counted_tokens`:
    what of it went into the tenant's use; `held`: paused by its tenant's quota, and goes on by itself. `sample_step`
    and `sample_path`: the evaluated adapter that has yet to answer the job's prompts.
    """

    __tablename__ = "jobs"
    __table_args__ = (
        CheckConstraint("state IN ({})".format(", ".join(f"'{state}'" for state in STATES)), name="state"),
        CheckConstraint("command IN ('pause', 'stop', 'save')", name="command"),
        Index(None, "state", "priority", "seq"),
        Index(None, "tenant", "seq"),
        Index(None, "tenant", "state", "seq"),
        Index(None, "state", "seq"),
        {"sqlite_autoincrement": True},
    )

    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(40), unique=True)
    name: Mapped[str] = mapped_column(String(120))
    state: Mapped[str] = mapped_column(String(16))
    spec: Mapped[dict[str, Any]]
    dataset_id: Mapped[str] = mapped_column(String(40), index=True)
    dataset_name: Mapped[str] = mapped_column(String(63))
    adapter_name: Mapped[str] = mapped_column(String(63), index=True)
    adapter_version: Mapped[int | None]
    initial_adapter: Mapped[str | None] = mapped_column(String(63))
    initial_version: Mapped[int | None]
    created_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    state_since: Mapped[datetime]
    priority: Mapped[int] = mapped_column(default=0)
    place: Mapped[float | None]
    deadline: Mapped[datetime | None]
    deadline_warned: Mapped[bool] = mapped_column(default=False)
    schedule_id: Mapped[str | None] = mapped_column(String(40), index=True)
    expected_tokens: Mapped[int | None] = mapped_column(BigInteger)
    counted_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    held: Mapped[bool] = mapped_column(default=False)
    step: Mapped[int] = mapped_column(default=0)
    total_steps: Mapped[int | None]
    epoch: Mapped[float | None]
    loss: Mapped[float | None]
    first_loss: Mapped[float | None]
    eval_loss: Mapped[float | None]
    best_step: Mapped[int | None]
    best_loss: Mapped[float | None]
    sample_step: Mapped[int | None]
    sample_path: Mapped[str | None] = mapped_column(String(4096))
    tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    resumes: Mapped[int] = mapped_column(default=0)
    stalls: Mapped[int] = mapped_column(default=0)
    start_step: Mapped[int] = mapped_column(default=0)
    error: Mapped[dict[str, Any] | None]
    command: Mapped[str | None] = mapped_column(String(8))
    command_at: Mapped[datetime | None]
    engine_id: Mapped[str | None] = mapped_column(String(120))
    token: Mapped[int | None]
    checkpoint: Mapped[str | None] = mapped_column(String(4096))
    checkpoint_step: Mapped[int | None]


class JobEventRecord(Base):
    """A transition (both states set) or a remark (none). `token`: the lease under which it happened, if any."""

    __tablename__ = "job_events"
    __table_args__ = (Index(None, "job_id", "id"), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    time: Mapped[datetime]
    kind: Mapped[str] = mapped_column(String(40))
    from_state: Mapped[str | None] = mapped_column(String(16))
    to_state: Mapped[str | None] = mapped_column(String(16))
    token: Mapped[int | None]
    message: Mapped[str] = mapped_column(Text, default="")


class JobMetricRecord(Base):
    """One optimizer step; a step that is done again after a resume replaces what it measured before."""

    __tablename__ = "job_metrics"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    time: Mapped[datetime]
    loss: Mapped[float | None]
    eval_loss: Mapped[float | None]
    learning_rate: Mapped[float | None]
    grad_norm: Mapped[float | None]
    tokens: Mapped[int | None] = mapped_column(BigInteger)


class JobLogRecord(Base):
    __tablename__ = "job_logs"
    __table_args__ = (Index(None, "job_id", "id"), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    time: Mapped[datetime]
    message: Mapped[str] = mapped_column(Text)


FIGURES = ("step", "epoch", "loss", "first_loss", "eval_loss", "best_step", "best_loss", "tokens", "counted_tokens")
MEASURED = ("loss", "eval_loss", "learning_rate", "grad_norm", "tokens")

_TABLE = JobRecord.table()
_WATCHED = select(
    *(_TABLE.c[name] for name in ("id", "tenant", "state", "engine_id", "token", "total_steps", *FIGURES))
).where(_TABLE.c.id == bindparam("of"))
_SET = update(_TABLE).where(_TABLE.c.id == bindparam("of"))
_ADD_LOG = insert(JobLogRecord.table())
# In the order of hand-out.
_ORDER = (JobRecord.priority.desc(), func.coalesce(JobRecord.place, JobRecord.seq), JobRecord.seq)
# Asked for several times a second, so that they are built once.
_IN_STATES = JobRecord.state.in_(bindparam("states", expanding=True))
_RECORDS = select(JobRecord).where(_IN_STATES).order_by(*_ORDER)
_BRIEF = select(
    JobRecord.id, JobRecord.tenant, JobRecord.name, JobRecord.state, JobRecord.command, JobRecord.stalls, JobRecord.held
).where(_IN_STATES).order_by(*_ORDER)  # fmt: skip
_NEXT = (
    select(JobRecord)
    .where(
        or_(
            JobRecord.state == "queued",
            and_(JobRecord.state == "interrupted", JobRecord.stalls < bindparam("max_stalls")),
            and_(JobRecord.state == "paused", JobRecord.held.is_(True)),
        ),
        JobRecord.tenant.not_in(bindparam("not_of", expanding=True)),
    )
    .order_by(*_ORDER)
    .limit(1)
)
_COUNTS = select(JobRecord.state, func.count()).group_by(JobRecord.state)


def find(session: Session, job_id: str) -> JobRecord | None:
    return session.scalar(select(JobRecord).where(JobRecord.id == job_id))


def page(
    session: Session, columns: tuple[str, ...], limit: int, before: int | None, state: str | None
) -> Sequence[Row[Any]]:
    """Some columns, by name, and `seq`; `spec` as the JSON that is stored. Newest first, those with a `seq` below
    `before`, of one state or all."""
    tenant = only(session)
    given = {"most": limit, "before": before, "state": state, "tenant": tenant}
    query = _newest_first(columns, *(given[name] is not None for name in ("before", "state", "tenant")))
    return session.connection().execute(query, given).all()


@functools.cache
def _newest_first(columns: tuple[str, ...], before: bool, state: bool, tenant: bool) -> Select[Any]:
    """Of the table and not of the model, whose rows take SQLAlchemy three times as long."""
    of = _TABLE.c
    chosen = (cast(of.spec, Text) if name == "spec" else of[name] for name in columns)
    query = select(*chosen, of.seq).order_by(of.seq.desc()).limit(bindparam("most", type_=Integer()))
    if before:
        query = query.where(of.seq < bindparam("before", type_=Integer()))
    if state:
        query = query.where(of.state == bindparam("state", type_=String()))
    if tenant:
        query = query.where(of.tenant == bindparam("tenant", type_=String()))
    return query


def in_states(session: Session, states: Collection[str], *, everyones: bool = False) -> list[JobRecord]:
    """In the order of hand-out: the highest priority first, then by place, which is age unless someone moved it.
    `everyones`: those of all tenants, to be counted and not shown."""
    options = all_tenants() if everyones else {}
    return list(session.scalars(_RECORDS, {"states": list(states)}, execution_options=options))


def brief(session: Session, states: Collection[str]) -> Sequence[Row[str, str, str, str, str | None, int, bool]]:
    """Of the jobs of all tenants in these states, to be counted and not shown, what their place in the queue depends
    on: id, tenant, name, state, command, stalls, held. In the order of hand-out."""
    return session.execute(_BRIEF, {"states": list(states)}, execution_options=all_tenants()).all()


def next_waiting(session: Session, max_stalls: int, not_of: Collection[str] = ()) -> JobRecord | None:
    """The one to hand out next, in the order of `in_states`: queued, interrupted (but for those that keep failing) or
    held back by a quota; none of the tenants `not_of`."""
    return session.scalar(_NEXT, {"max_stalls": max_stalls, "not_of": list(not_of)})


def counts(session: Session) -> dict[str, int]:
    """Jobs per state, those of states that have any."""
    return {row[0]: row[1] for row in session.execute(_COUNTS)}


def count(session: Session, tenant: str, states: Collection[str]) -> int:
    """A tenant's jobs in these states."""
    query = select(func.count()).where(JobRecord.tenant == tenant, JobRecord.state.in_(states))
    return session.scalar(query) or 0


def with_deadline(session: Session) -> list[JobRecord]:
    """Jobs that have not ended and have a deadline."""
    query = select(JobRecord).where(JobRecord.deadline.is_not(None), JobRecord.state.not_in(TERMINAL))
    return list(session.scalars(query))


def to_sample(session: Session) -> list[JobRecord]:
    """Jobs with an evaluated adapter that has yet to answer their prompts."""
    return list(session.scalars(select(JobRecord).where(JobRecord.sample_path.is_not(None))))


def ended_before(session: Session, time: datetime, limit: int) -> list[JobRecord]:
    query = select(JobRecord).where(JobRecord.state.in_(TERMINAL), JobRecord.ended_at < time)
    return list(session.scalars(query.order_by(JobRecord.seq).limit(limit)))


def open_with_dataset(session: Session, dataset_ids: Collection[str]) -> JobRecord | None:
    """A job that has not ended and reads one of the data sets."""
    query = select(JobRecord).where(JobRecord.dataset_id.in_(dataset_ids), JobRecord.state.not_in(TERMINAL))
    return session.scalar(query.limit(1))


def open_with_output(session: Session, adapter_name: str) -> JobRecord | None:
    """A job, of whatever tenant, that has not ended and will write the adapter."""
    query = select(JobRecord).where(JobRecord.adapter_name == adapter_name, JobRecord.state.not_in(TERMINAL))
    return session.scalar(query.limit(1), execution_options=all_tenants())


def open_with_initial(session: Session, adapter_name: str, version: int | None) -> JobRecord | None:
    """A job that has not ended and starts from the adapter (from that version, or from any)."""
    query = select(JobRecord).where(JobRecord.initial_adapter == adapter_name, JobRecord.state.not_in(TERMINAL))
    if version is not None:
        query = query.where(JobRecord.initial_version == version)
    return session.scalar(query.limit(1))


def events(session: Session, job_id: str, after: int, limit: int) -> list[JobEventRecord]:
    query = select(JobEventRecord).where(JobEventRecord.job_id == job_id, JobEventRecord.id > after)
    return list(session.scalars(query.order_by(JobEventRecord.id).limit(limit)))


def metrics(session: Session, job_id: str, after: int, limit: int) -> list[JobMetricRecord]:
    query = select(JobMetricRecord).where(JobMetricRecord.job_id == job_id, JobMetricRecord.step > after)
    return list(session.scalars(query.order_by(JobMetricRecord.step).limit(limit)))


def log(session: Session, job_id: str, after: int, limit: int) -> list[JobLogRecord]:
    query = select(JobLogRecord).where(JobLogRecord.job_id == job_id, JobLogRecord.id > after)
    return list(session.scalars(query.order_by(JobLogRecord.id).limit(limit)))


def watched(session: Session, job_id: str) -> Row[*tuple[Any, ...]] | None:
    """Of a job what tells whether a report of it is taken, what the report is told with, and its FIGURES so far."""
    return session.connection().execute(_WATCHED, {"of": job_id}).one_or_none()


def put_figures(session: Session, job_id: str, figures: Mapping[str, Any]) -> None:
    """Set all of a job's FIGURES. They come many times a second and are no change of the job: nobody is told of them
    (`db.touched`)."""
    session.connection().execute(_SET, {"of": job_id, **figures})


def put_metrics(session: Session, job_id: str, steps: Iterable[Mapping[str, Any]]) -> None:
    """Of each of `steps` (`step`, `time`, and all MEASURED), add to the step's row what is measured (not None); the row
    is made when it is the step's first."""
    connection = session.connection()
    connection.execute(_measuring(connection.dialect.name), [{"job_id": job_id, **step} for step in steps])
    touched.note(session, JobMetricRecord.__tablename__)


@functools.cache
def _measuring(dialect: str) -> Executable:
    table = JobMetricRecord.table()
    adding = upsert(table, dialect)
    measured = {name: func.coalesce(adding.excluded[name], table.c[name]) for name in MEASURED}
    return adding.on_conflict_do_update(
        index_elements=["job_id", "step"], set_={"time": adding.excluded.time, **measured}
    )


def add_log(session: Session, job_id: str, lines: Iterable[tuple[datetime, str]]) -> None:
    """Lines of a job's log, in order."""
    rows = [{"job_id": job_id, "time": time, "message": message} for time, message in lines]
    session.connection().execute(_ADD_LOG, rows)
    touched.note(session, JobLogRecord.__tablename__)


def drop_metrics_after(session: Session, job_id: str, step: int) -> None:
    """Forget steps beyond a checkpoint that the job goes back to."""
    session.execute(delete(JobMetricRecord).where(JobMetricRecord.job_id == job_id, JobMetricRecord.step > step))


def prune_logs(session: Session) -> None:
    """Keep the newest lines of each job, so that a chatty one cannot fill the disk."""
    totals = select(JobLogRecord.job_id).group_by(JobLogRecord.job_id).having(func.count() > _KEPT_LOG_LINES)
    for job_id in session.scalars(totals).all():
        newest = select(JobLogRecord.id).where(JobLogRecord.job_id == job_id)
        keep_from = session.scalar(newest.order_by(JobLogRecord.id.desc()).offset(_KEPT_LOG_LINES).limit(1))
        session.execute(delete(JobLogRecord).where(JobLogRecord.job_id == job_id, JobLogRecord.id <= keep_from))
