"""Following the engine and handing out jobs: what the owner of the dispatch lease does.

One thread owns a `Dispatcher`: it feeds it what the engine says (`receive`), and lets it act (`tick`, a few times a
second and when something was asked; `reap`, once a second). All that must outlive the process is in the store; a new
owner goes on from there and from the engine's next hello. What is kept here: the engine's last sign of life, what it
holds, and which commands it has been sent.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
from sqlalchemy.orm import Session

from core.control import adapters, notices, orders, progress, quotas, targets
from core.control import telemetry as history
from core.control.context import Control
from core.control.elapsed import Elapsed
from core.control.jobs import MAX_STALLS
from core.control.lifecycle import TRANSITIONS, remark, transition
from core.errors import HarliError, full_disk
from core.link.messages import (
    PROTOCOL,
    EngineNotice,
    FromEngine,
    Goodbye,
    Hello,
    JobUpdate,
    Learnt,
    PauseJob,
    SetTargets,
    StartJob,
    StopJob,
    Stopping,
    Telemetry,
    ToEngine,
)
from core.telemetry import interval as intervals
from core.telemetry.window import Seconds
from db import adapters as adapter_rows
from db import changes, engines, leases
from db import jobs as rows
from db.base import now
from db.engines import EngineRecord
from db.jobs import IN_ENGINE, TERMINAL, JobRecord

logger = logging.getLogger(__name__)

SILENCE_S = 10.0
ENGINE_LEASE = "engine"
# How long the engine may take over what was asked of it, before the job is settled without it.
COMMAND_S = {"stop": 30.0, "pause": 120.0, "save": 120.0}
STARTING_S = 900.0
SAVING_S = 300.0
_RELEASE_EVERY_S = 5.0
_BUSY_PAUSE_S = 2.0
# What a job may write; uploads have a limit of their own.
_MAX_ADAPTER_BYTES = 1 << 40
_ENDED = ("paused", "succeeded", "cancelled", "failed", "interrupted")

Send = Callable[[str, ToEngine], bool]
# What an engine is to do with a job: the job, the command or the state to get past, since when.
Awaited = tuple[str, str, datetime]


class LeaseLost(Exception):
    """Another process dispatches by now; this one must not write."""


@dataclass
class _Link:
    """What is known of the engine. `holding`: the (job, token) it works on; `heard`: monotonic seconds; `connected`: it
    has reported to this process; `lost`: it has been given up on; `stopping`: it takes no further job."""

    engine_id: str
    heard: float
    holding: tuple[str, int] | None = None
    applied_version: int | None = None
    connected: bool = False
    lost: bool = False
    stopping: bool = False


class Dispatcher:
    """`send` puts a message on the link; `holder` and `token` are of the dispatch lease, checked in every write."""

    def __init__(self, control: Control, send: Send, *, holder: str, token: int) -> None:
        self._control = control
        self._send = send
        self._holder = holder
        self._token = token
        self._seconds = Seconds()
        self._done: deque[tuple[int, intervals.Interval]] = deque(maxlen=600)
        self._link: _Link | None = None
        self._itl_ms: dict[str | None, float] = {}
        self._sent_targets: tuple[str, SetTargets] | None = None
        self._sent_commands: set[tuple[str, int, str]] = set()
        self._unsent: StartJob | None = None
        # Jobs whose adapter the disk has no room for, and what `_register` is told of each.
        self._unstored: dict[str, tuple[int | None, Path, JobUpdate | None]] = {}
        self._released: dict[tuple[str, int], float] = {}
        self._not_before = 0.0
        self._awaited: Elapsed[Awaited] = Elapsed()
        self._adopt_known_engine()

    def _adopt_known_engine(self) -> None:
        """Until the engine says hello to this owner, it is the one that the last owner knew, with time to report."""
        with self._control.store.read() as session:
            record = engines.current(session)
            if record is None or record.state != "ready":
                return
            held = [job for job in rows.in_states(session, IN_ENGINE) if job.engine_id == record.id]
            self._link = _Link(record.id, time.monotonic(), applied_version=record.applied_version)
            if held and held[0].token is not None:
                self._link.holding = (held[0].id, held[0].token)

    @contextmanager
    def _write(self) -> Iterator[Session]:
        with self._control.store.write() as session:
            if not leases.holds(session, "dispatcher", self._holder, self._token):
                raise LeaseLost
            yield session

    # ---- what the engine says ----------------------------------------------------------------------------------------

    def receive(self, engine_id: str, message: FromEngine) -> None:
        """Take in one message. Safe to repeat when the store failed in the middle."""
        if isinstance(message, Hello):
            self._hello(message)
            return
        link = self._heard(engine_id, message)
        if link is None:
            return
        if isinstance(message, Telemetry):
            self._telemetry(link, message)
        elif isinstance(message, JobUpdate) and message.kind == "metric":
            self._metrics(link, [message])
        elif isinstance(message, JobUpdate):
            self._job_update(link, message)
        elif isinstance(message, EngineNotice):
            self._notice(message)
        elif isinstance(message, Learnt):
            self._learnt(message)
        elif isinstance(message, Stopping):
            link.stopping = True
        elif isinstance(message, Goodbye):
            self._goodbye(link)

    def receive_metrics(self, engine_id: str, updates: Sequence[JobUpdate]) -> bool:
        """Take in metrics (at least one) of one job and token that came one after the other, in one transaction; as
        safe to repeat. True, to be told from what did not come to an end."""
        if (link := self._heard(engine_id, updates[0])) is not None:
            self._metrics(link, updates)
        return True

    def _heard(self, engine_id: str, message: FromEngine) -> _Link | None:
        """The link that a message came by, which is alive then; None for one that is not the engine's of now."""
        link = self._link
        if link is None or link.engine_id != engine_id:
            # An engine that another one replaced, or one whose hello is still to come.
            if isinstance(message, JobUpdate) and message.kind not in _ENDED:
                self._release(engine_id, message.job_id, message.token)
            return None
        link.heard, link.connected = time.monotonic(), True
        if link.lost:
            self._back(link)
        return link

    def _hello(self, hello: Hello) -> None:
        if hello.protocol != PROTOCOL:
            logger.error(
                "engine %s speaks version %d of the link, this API version %d; start both from one installation",
                hello.engine_id,
                hello.protocol,
                PROTOCOL,
            )
            return
        holding = (
            (hello.running_job, hello.running_token)
            if hello.running_job is not None and hello.running_token is not None
            else None
        )
        known = self._link.engine_id if self._link is not None else None
        with self._write() as session:
            time_ = now()
            record = session.get(EngineRecord, hello.engine_id)
            fresh = record is None
            if record is None:
                record = EngineRecord(id=hello.engine_id, since=time_)
                session.add(record)
            record.hello = msgspec.to_builtins(hello)
            record.state, record.state_since = "ready", time_
            if known != hello.engine_id:
                record.since = time_
            record.applied_version = None
            for other in (others := engines.others(session, hello.engine_id)):
                if other.state != "gone":
                    other.state, other.state_since = "gone", time_
            _precede(others, record.since)
            if fresh:
                self._forget_deployments(session, hello.engine_id)
            targets.propose(session, hello.solo_itl_ms)
            self._reconcile(session, hello.engine_id, holding)
            changes.add(session, "engine", "ready", hello.engine_id, model=hello.model)
        self._link = _Link(hello.engine_id, time.monotonic(), holding, connected=True)
        if known != hello.engine_id:
            self._unsent = None
        self._sent_targets = None
        self._sent_commands.clear()
        self.tick()

    @staticmethod
    def _forget_deployments(session: Session, engine_id: str) -> None:
        """A fresh engine serves no adapter; what is wanted is loaded into it anew."""
        for record in adapter_rows.everything(session):
            if record.deleted:
                adapter_rows.remove(session, record)
                continue
            record.deployed_version = None
            record.engine_id = engine_id
            adapters.want(session, record, record.wanted_version)

    def _reconcile(self, session: Session, engine_id: str, holding: tuple[str, int] | None) -> None:
        """Jobs that the store thinks an engine holds, against what this one says it holds."""
        for job in rows.in_states(session, (*IN_ENGINE, "interrupted")):
            if holding is not None and (job.id, job.token) == holding:
                job.engine_id = engine_id
                if job.state == "interrupted":
                    progress.adopt(session, job)
            elif job.state in IN_ENGINE and job.engine_id is not None:
                just_sent = self._unsent is not None and self._unsent.spec.job_id == job.id
                if not (just_sent and job.engine_id == engine_id):
                    progress.interrupt(session, job, "the engine that ran it is gone")

    def _back(self, link: _Link) -> None:
        """An engine that was given up on reports again; it may go on with the job that no one else was given."""
        with self._write() as session:
            record = session.get_one(EngineRecord, link.engine_id)
            record.state, record.state_since = "ready", now()
            for job in rows.in_states(session, ("interrupted",)):
                if link.holding == (job.id, job.token) and job.engine_id == link.engine_id:
                    progress.adopt(session, job)
            changes.add(session, "engine", "ready", link.engine_id)
        link.lost = False

    def _telemetry(self, link: _Link, message: Telemetry) -> None:
        if message.time > (limit := time.time()):
            message = msgspec.structs.replace(message, time=limit)
        interval = intervals.of_message(message, self._itl_ms)
        self._control.window.add(interval, limit - message.time)
        self._control.totals.add(interval)
        if (done := self._seconds.add(interval)) is not None:
            self._done.append(done)
        applied = message.targets_version if message.targets_version != link.applied_version else None
        if not self._done and applied is None:
            return
        with self._write() as session:
            for second in self._done:
                history.put_second(session, *second)
            if applied is not None:
                session.get_one(EngineRecord, link.engine_id).applied_version = applied
                changes.add(session, "targets", "applied", str(applied), version=applied)
        self._done.clear()
        link.applied_version = message.targets_version

    def _notice(self, message: EngineNotice) -> None:
        time_ = datetime.fromtimestamp(min(message.time, time.time()), UTC)
        with self._write() as session:
            notices.add(session, message.engine_id, message.level, message.code, message.message, time_)
            held = {(job.id, job.token) for job in rows.in_states(session, IN_ENGINE)}
        if message.code == "unknown_job" and self._link is not None and self._link.holding not in held:
            # It was told to let go of something that it does not hold after all.
            self._link.holding = None

    def _learnt(self, message: Learnt) -> None:
        with self._write() as session:
            session.get_one(EngineRecord, message.engine_id).learnt = msgspec.to_builtins(message)

    def _goodbye(self, link: _Link) -> None:
        with self._write() as session:
            record = session.get_one(EngineRecord, link.engine_id)
            record.state, record.state_since = "gone", now()
            for job in rows.in_states(session, IN_ENGINE):
                if job.engine_id == link.engine_id:
                    progress.interrupt(session, job, "the engine stopped")
            changes.add(session, "engine", "absent", link.engine_id)
        self._link = None

    # ---- what happens to the job -------------------------------------------------------------------------------------

    def _job_update(self, link: _Link, update: JobUpdate) -> None:
        self._note_holding(link, update)
        if update.kind == "succeeded":
            self._succeeded(link, update)
        else:
            with self._write() as session:
                job = rows.find(session, update.job_id)
                fresh = job is not None and job.token == update.token and job.engine_id == link.engine_id
                if job is not None and fresh:
                    progress.apply(session, job, update)
            if fresh and update.code == progress.ENGINE_BUSY:
                self._not_before = time.monotonic() + _BUSY_PAUSE_S
            elif not fresh and update.kind not in _ENDED:
                self._release(link.engine_id, update.job_id, update.token)
        if link.holding is None:
            self.tick()

    def _metrics(self, link: _Link, updates: Sequence[JobUpdate]) -> None:
        job_id, token = updates[0].job_id, updates[0].token
        self._note_holding(link, updates[0])
        with self._write() as session:
            job = rows.watched(session, job_id)
            fresh = job is not None and job.token == token and job.engine_id == link.engine_id
            if job is not None and fresh:
                progress.measured(session, job, updates)
        if not fresh:
            self._release(link.engine_id, job_id, token)

    def _succeeded(self, link: _Link, update: JobUpdate) -> None:
        with self._control.store.read() as session:
            job = rows.find(session, update.job_id)
            fresh = job is not None and job.token == update.token and job.engine_id == link.engine_id
        if fresh:
            self._take(update.job_id, update.token, Path(update.path or ""), update)

    @staticmethod
    def _note_holding(link: _Link, update: JobUpdate) -> None:
        """What the engine works on, by what it says; under an older token than it was given it is old news."""
        current = link.holding
        if current is not None and current[0] == update.job_id and update.token < current[1]:
            return
        if update.kind not in _ENDED:
            link.holding = (update.job_id, update.token)
        elif current is not None and current[0] == update.job_id:
            link.holding = None

    def _take(self, job_id: str, token: int | None, source: Path, update: JobUpdate | None) -> None:
        """Store the adapter that a job wrote, or try again until the disk has room for it."""
        if not self._register(job_id, token, source, update):
            logger.warning("the disk has no room for the adapter of job %s; storing it is tried again", job_id)
            self._unstored[job_id] = token, source, update

    def _register(self, job_id: str, token: int | None, source: Path, update: JobUpdate | None) -> bool:
        """Store what the job wrote as its adapter's next version, and end it; deploy when it asked for that. False
        where the disk has no room, and nothing was done."""
        try:
            unpacked = adapters.unpacked(self._control, source, max_bytes=_MAX_ADAPTER_BYTES)
            with unpacked as (folder, info), self._write() as session:
                job = rows.find(session, job_id)
                if job is None or job.token != token or job.state in TERMINAL:
                    return True
                if update is not None:
                    job.step = max(job.step, update.step)
                    job.tokens = update.tokens if update.tokens is not None else job.tokens
                if job.state == "interrupted":
                    progress.adopt(session, job)
                if job.state != "saving":
                    transition(session, job, "saving", "saving", "saving the adapter")
                record = adapters.store(
                    self._control,
                    session,
                    folder,
                    info,
                    job.adapter_name,
                    tenant=job.tenant,
                    origin="trained",
                    job_id=job.id,
                    dataset_id=job.dataset_id,
                    base=job.spec.get("base_model"),
                )
                job.adapter_version = record.last_version
                name = f"{job.adapter_name}@{record.last_version}"
                which = f", {update.message}" if update is not None and update.message else ""
                transition(session, job, "succeeded", "succeeded", f"stored as adapter {name}{which}")
                if job.spec["deploy"]:
                    adapters.want(session, record, record.last_version)
        except (HarliError, OSError) as error:
            if full_disk(error) is not None:
                return False
            with self._write() as session:
                job = rows.find(session, job_id)
                if job is not None and job.token == token and "failed" in TRANSITIONS[job.state]:
                    message = f"the adapter that the job wrote to {source} cannot be stored: {error}"
                    progress.fail(session, job, "adapter_unusable", message, None)
        return True

    # ---- acting ------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Send what has to be sent: moved targets, commands, the next job."""
        self._save_checkpoints()
        link = self._link
        if link is None or link.lost or not link.connected:
            return
        with self._control.store.read() as session:
            wanted = targets.order(session, now())
            held = [job for job in rows.in_states(session, IN_ENGINE) if job.engine_id == link.engine_id]
            waiting = rows.next_waiting(session, MAX_STALLS, tuple(quotas.reasons(session)))
        self._send_targets(link, wanted)
        if self._unsent is not None and self._send(link.engine_id, self._unsent):
            self._unsent = None
        for job in held:
            self._send_command(link, job)
        if link.holding is not None and not any((job.id, job.token) == link.holding for job in held):
            self._release(link.engine_id, *link.holding)
        elif self._takes_jobs(link, held) and waiting is not None:
            self._hand_out(link, waiting.id)

    def _takes_jobs(self, link: _Link, held: list[JobRecord]) -> bool:
        return link.holding is None and not held and not link.stopping and time.monotonic() >= self._not_before

    def _send_targets(self, link: _Link, wanted: targets.Order | None) -> None:
        """Targets are sent anew when someone set others, and when a window opened or closed."""
        self._itl_ms = targets.tightest_itl_ms(wanted.in_force) if wanted is not None else {}
        if wanted is None or self._sent_targets == (link.engine_id, wanted.message):
            return
        before = self._sent_targets
        if not self._send(link.engine_id, wanted.message):
            return
        self._sent_targets = (link.engine_id, wanted.message)
        if before is not None and before[0] == link.engine_id and before[1].targets != wanted.message.targets:
            with self._write() as session:
                notices.add(session, link.engine_id, "info", "targets", targets.told(wanted), now())
                changes.add(session, "targets", "in_force", str(wanted.message.version))

    def _send_command(self, link: _Link, job: JobRecord) -> None:
        if job.command is None or job.token is None or self._unsent is not None:
            return
        key = (job.id, job.token, job.command)
        if key in self._sent_commands:
            return
        message: ToEngine = (
            PauseJob(job_id=job.id, token=job.token)
            if job.command == "pause"
            else StopJob(job_id=job.id, token=job.token, save=job.command == "save")
        )
        if self._send(link.engine_id, message):
            self._sent_commands.add(key)

    def _release(self, engine_id: str, job_id: str, token: int) -> None:
        """Have an engine let go of what it holds under a lease that is over; said again now and then, not each time."""
        time_ = time.monotonic()
        if time_ - self._released.get((job_id, token), -_RELEASE_EVERY_S) >= _RELEASE_EVERY_S:
            self._released = {key: at for key, at in self._released.items() if time_ - at < 60}
            self._released[job_id, token] = time_
            self._send(engine_id, StopJob(job_id=job_id, token=token, save=False))

    def _hand_out(self, link: _Link, job_id: str) -> None:
        with self._write() as session:
            job = rows.find(session, job_id)
            if job is not None and job.state == "paused" and job.held:
                transition(session, job, "queued", "resumed", "the tenant's quota allows it again")
            if job is None or job.state not in ("queued", "interrupted"):
                return
            try:
                spec = orders.spec(self._control, session, job)
            except HarliError as error:
                progress.fail(session, job, error.code, error.message, error.param)
                return
            resume_from = orders.newest_checkpoint(self._control.job_folder(job.id), job.checkpoint)
            again = job.started_at is not None
            job.resumes += again
            job.token = leases.next_token(session, ENGINE_LEASE, link.engine_id)
            place = f" with checkpoint {resume_from.name}" if resume_from is not None else ""
            transition(session, job, "starting", "starting", f"handed to the engine{place}")
            job.engine_id = link.engine_id
            message = StartJob(
                spec=spec, token=job.token, resume_from=str(resume_from) if resume_from is not None else None
            )
        link.holding = (job_id, message.token)
        if not self._send(link.engine_id, message):
            self._unsent = message

    def _save_checkpoints(self) -> None:
        """Finish jobs that are to be saved from a checkpoint, with no engine holding them."""
        with self._control.store.read() as session:
            found = [job for job in rows.in_states(session, ("saving",)) if job.engine_id is None]
        for job in found:
            if job.id in self._unstored:
                continue
            folder = self._control.job_folder(job.id)
            checkpoint = orders.newest_checkpoint(folder, job.checkpoint)
            if checkpoint is None:
                source = folder / "checkpoints"
            else:
                source = orders.adapter_folder(folder, checkpoint, bool(job.spec.get("keep_best")))
            self._take(job.id, None, source, None)

    # ---- what takes too long -----------------------------------------------------------------------------------------

    def reap(self) -> None:
        """Give up on an engine that has been silent too long, and on what it does not do in time; try once more to
        store the adapters that there was no room for."""
        self._unstored = {job_id: how for job_id, how in self._unstored.items() if not self._register(job_id, *how)}
        link = self._link
        if link is not None and not link.lost and time.monotonic() - link.heard > SILENCE_S:
            self._lose(link)
        with self._control.store.read() as session:
            awaited = [_awaited(job) for job in rows.in_states(session, IN_ENGINE) if job.engine_id is not None]
        limits = {**COMMAND_S, "starting": STARTING_S, "saving": SAVING_S}
        late = [one for one, s in self._awaited.seconds(awaited).items() if s > limits.get(one[1], math.inf)]
        for one in late:
            if one[0] in self._unstored:
                continue
            with self._write() as session:
                job = rows.find(session, one[0])
                if job is not None and job.state in IN_ENGINE and _awaited(job) == one:
                    doing = f"do what was asked ({job.command})" if job.command else f"get past {job.state}"
                    job.token = None
                    progress.interrupt(session, job, f"the engine did not {doing} in time; settled without it")
        if self._obey_quotas() or late:
            self.tick()

    def _obey_quotas(self) -> bool:
        """Have jobs stand back whose tenant has used up its tokens; whether any did."""
        with self._control.store.read() as session:
            running = [job for job in rows.in_states(session, ("running",)) if job.command is None]
            over = {job.id: why for job in running if (why := quotas.exhausted(session, job.tenant)) is not None}
        if not over:
            return False
        with self._write() as session:
            for job_id, why in over.items():
                job = rows.find(session, job_id)
                if job is not None and job.state == "running" and job.command is None:
                    remark(session, job, "quota", f"asked to stand back: {why}")
                    job.command, job.command_at, job.held = "pause", now(), True
        return True

    def _lose(self, link: _Link) -> None:
        with self._write() as session:
            record = session.get_one(EngineRecord, link.engine_id)
            record.state, record.state_since = "lost", now()
            for job in rows.in_states(session, IN_ENGINE):
                if job.engine_id == link.engine_id:
                    progress.interrupt(session, job, f"the engine has been silent for {SILENCE_S:g} s")
            changes.add(session, "engine", "lost", link.engine_id)
        link.lost = True
        self._unsent = None

    def flush(self) -> None:
        """Store the second that is still open, at the end of this ownership."""
        if (done := self._seconds.flush()) is not None:
            with self._write() as session:
                history.put_second(session, *done)


def _awaited(job: JobRecord) -> Awaited:
    if job.command is not None and job.command_at is not None:
        return job.id, job.command, job.command_at
    return job.id, job.state, job.state_since


def _precede(others: Sequence[EngineRecord], since: datetime) -> None:
    """Have other engines be older than one that came at `since`, in the order that they have: where the clock was set
    back they can seem younger."""
    for other in sorted(others, key=lambda other: other.since, reverse=True):
        if other.since < since:
            return
        since = other.since = since - timedelta(microseconds=1)
