"""Who dispatches: of all API processes on one store the one that holds the lease, and only while it does.

Every process tries to take (or renews) the lease every second or so. The holder binds the engine link, follows it in a
thread of its own, and runs the schedules: dispatch, reaping, deployment, retention. When the holder dies, another one
has the lease within its length; when it merely stood still, it finds its token outdated at its next write and stops.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TypeVar

import msgspec
from apscheduler.executors.pool import ThreadPoolExecutor
from sqlalchemy.orm import Session

from core.control import alerts, deliverer, leftovers, old_versions, operations, outlook, retention, schedules
from core.control import telemetry as history
from core.control.context import Control, new_id
from core.control.deliverer import Deliverer
from core.control.deployer import Deployer
from core.control.dispatcher import Dispatcher, LeaseLost
from core.control.elapsed import Elapsed
from core.control.pacing import PacedScheduler
from core.control.sampler import Sampler
from core.link.messages import FromEngine, JobUpdate, Telemetry
from core.link.transport import ControlEnd, LinkError
from db import leases
from db.base import now
from db.store import OUTAGE

logger = logging.getLogger(__name__)

LEASE = "dispatcher"
LEASE_S = 6.0
_RENEW_S = 1.5
_TICK_S = 0.25
_REAP_S = 1.0
_DEPLOY_S = 0.5
_ROLL_UP_S = 10.0
_RETAIN_S = 300.0
_ALERTS_S = 5.0
_SAMPLE_S = 2.0
_SCHEDULES_S = 5.0
_WEBHOOKS_S = 1.0
_DEADLINES_S = 30.0
_POLL_MS = 40
# Messages of the link that are looked at before ticks have their turn.
_MOST_AT_ONCE = 200
_RETRY_S = 0.5
# What the dispatcher's next orders depend on; who writes to these has it look at once.
_ORDERS = frozenset({"jobs", "targets", "adapters", "quotas", "finetune_usage"})

T = TypeVar("T")


class Owner:
    """An API process's candidacy for the lease, and the work that comes with it. `start` it once."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._holder = new_id(f"{socket.gethostname()[:60]}-{os.getpid()}")
        self._scheduler = PacedScheduler(
            executors={"default": ThreadPoolExecutor(4)},
            # A run that comes late still runs, several missed ones run once, and none overtakes itself.
            job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": None},
            timezone=UTC,
        )
        # It warns whenever a schedule's last run is not over yet, which is what max_instances is for.
        logging.getLogger("apscheduler").setLevel(logging.ERROR)
        self._work: _Work | None = None
        self._ending = threading.Event()

    @property
    def owns(self) -> bool:
        """Whether this process dispatches."""
        return self._work is not None and self._work.running

    def start(self) -> None:
        self._control.store.on_commit(self._wake)
        self._candidate()
        self._scheduler.add_job(self._candidate, "interval", seconds=_RENEW_S, id="lease")
        self._scheduler.start()

    def stop(self) -> None:
        """End the work and let go of the lease, so that the next process need not wait."""
        self._ending.set()
        if self._scheduler.running:
            self._scheduler.shutdown(wait=True)
        self._end_work()
        try:
            with self._control.store.write() as session:
                leases.release(session, LEASE, self._holder)
        except OUTAGE as error:
            logger.warning("the dispatch lease could not be released: %s", error)

    def _wake(self, written: frozenset[str]) -> None:
        work = self._work
        if work is not None and written & _ORDERS:
            work.wake()

    def _candidate(self) -> None:
        """Take or renew the lease; begin or end the work accordingly."""
        try:
            with self._control.store.write() as session:
                token = leases.acquire(session, LEASE, self._holder, LEASE_S)
        except OUTAGE as error:
            logger.warning("the dispatch lease cannot be renewed: %s", error)
            return
        work = self._work
        if work is not None and (token != work.token or not work.running):
            self._end_work()
        if token is not None and self._work is None and not self._ending.is_set():
            self._begin_work(token)

    def _begin_work(self, token: int) -> None:
        try:
            end = ControlEnd(self._control.settings.resolved_link_url)
        except LinkError as error:
            # The last owner may still be letting go of the address; the next renewal tries again.
            logger.warning("%s", error.message)
            return
        logger.info("this process dispatches now (token %d)", token)
        work = self._work = _Work(self._control, end, self._holder, token)
        for run, seconds in (
            (work.ask_tick, _TICK_S),
            (work.ask_reap, _REAP_S),
            (work.deploy, _DEPLOY_S),
            (work.roll_up, _ROLL_UP_S),
            (work.retain, _RETAIN_S),
            (work.look_for_alerts, _ALERTS_S),
            (work.sample, _SAMPLE_S),
            (work.run_schedules, _SCHEDULES_S),
            (work.tell_webhooks, _WEBHOOKS_S),
            (work.look_at_deadlines, _DEADLINES_S),
        ):
            first = datetime.now(UTC)
            self._scheduler.add_job(
                run, "interval", seconds=seconds, id=run.__name__, replace_existing=True, next_run_time=first
            )

    def _end_work(self) -> None:
        work = self._work
        if work is None:
            return
        for job in self._scheduler.get_jobs():
            if job.id != "lease":
                job.remove()
        work.end()
        self._work = None
        logger.info("this process no longer dispatches")


class _Work:
    """What the holder of the lease does, from taking it to losing it. The link and the dispatcher are one thread's;
    schedules and commits ask that thread to act."""

    def __init__(self, control: Control, end: ControlEnd, holder: str, token: int) -> None:
        self.token = token
        self._control = control
        self._holder = holder
        self._end = end
        self._woken = threading.Event()
        self._reap_due = threading.Event()
        self._stopping = threading.Event()
        self._deploying: threading.Thread | None = None
        self._sampling: threading.Thread | None = None
        self._sampler = Sampler(control, self._write)
        self._deliverer = Deliverer(control, self._write)
        self._held: Elapsed[str] = Elapsed()
        self._silent: Elapsed[tuple[str, datetime]] = Elapsed()
        self._thread = threading.Thread(target=self._run, name="harli-link")
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive() and not self._stopping.is_set()

    def end(self) -> None:
        self._stopping.set()
        self._deliverer.close()
        self._thread.join()

    def wake(self) -> None:
        """Something was written: look at once. What the link's own thread writes needs no second look."""
        if threading.current_thread() is not self._thread:
            self._woken.set()

    # ---- schedules ---------------------------------------------------------------------------------------------------

    def ask_tick(self) -> None:
        self._woken.set()

    def ask_reap(self) -> None:
        self._reap_due.set()

    def deploy(self) -> None:
        """In a thread that nothing waits for: unloading an adapter lasts as long as the requests that use it."""
        if self._deploying is None or not self._deploying.is_alive():
            run = Deployer(self._control, self._write).run
            self._deploying = threading.Thread(target=self._guarded, args=(run,), name="harli-deploy", daemon=True)
            self._deploying.start()

    def sample(self) -> None:
        """In a thread of its own, since an answer takes as long as the engine takes."""
        if self._sampling is None or not self._sampling.is_alive():
            run = self._sampler.run
            self._sampling = threading.Thread(target=self._guarded, args=(run,), name="harli-sample", daemon=True)
            self._sampling.start()

    def run_schedules(self) -> None:
        self._guarded(lambda: schedules.run_due(self._control, now()))

    def tell_webhooks(self) -> None:
        self._guarded(self._deliverer.run)

    def look_at_deadlines(self) -> None:
        def run() -> None:
            with self._write() as session:
                outlook.warn_of_deadlines(session)

        self._guarded(run)

    def roll_up(self) -> None:
        def run() -> None:
            with self._write() as session:
                history.roll_up(session, now())

        self._guarded(run)

    def retain(self) -> None:
        def run() -> None:
            with self._write() as session:
                history.retain(session, now())
                deliverer.retain(session)
            retention.forget_old_jobs(self._control)
            leftovers.remove(self._control)
            operations.tidy(self._control, self._write, self._silent)
            old_versions.retire(self._control, self._write)

        self._guarded(run)

    def look_for_alerts(self) -> None:
        self._guarded(lambda: alerts.evaluate(self._control, self._write, now(), self._held))

    def _guarded(self, run: Callable[[], None]) -> None:
        if self._stopping.is_set():
            return
        try:
            run()
        except LeaseLost:
            self._stopping.set()
        except OUTAGE as error:
            logger.warning("the store did not take a write, it is tried again: %s", error)

    @contextmanager
    def _write(self) -> Iterator[Session]:
        with self._control.store.write() as session:
            if not leases.holds(session, LEASE, self._holder, self.token):
                raise LeaseLost
            yield session

    # ---- the link's thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            dispatcher = self._retried(self._dispatcher)
            while not self._stopping.is_set() and dispatcher is not None:
                self._turn(dispatcher)
            if dispatcher is not None:
                dispatcher.flush()
        except LeaseLost:
            logger.warning("another process took the dispatch lease")
        except OUTAGE as error:
            logger.warning("the last second's telemetry is lost: %s", error)
        finally:
            self._stopping.set()
            self._end.close()

    def _dispatcher(self) -> Dispatcher:
        return Dispatcher(self._control, self._end.send, holder=self._holder, token=self.token)

    def _turn(self, dispatcher: Dispatcher) -> None:
        for engine_id, messages in _together(self._arrived()):
            self._receive(dispatcher, engine_id, messages)
        if self._woken.is_set():
            self._woken.clear()
            self._retried(dispatcher.tick)
        if self._reap_due.is_set():
            self._reap_due.clear()
            self._retried(dispatcher.reap)

    def _arrived(self) -> list[tuple[str, FromEngine]]:
        """What has come by now, in order, after a moment's wait for the first."""
        found: list[tuple[str, FromEngine]] = []
        while len(found) < _MOST_AT_ONCE:
            try:
                received = self._end.receive(0 if found else _POLL_MS)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                logger.error(
                    "an engine sent what this version cannot read; start both from one installation: %s", error
                )
                break
            if received is None:
                break
            found.append(received)
        return found

    def _receive(self, dispatcher: Dispatcher, engine_id: str, messages: Sequence[FromEngine]) -> None:
        first = messages[0]
        metrics = [message for message in messages if isinstance(message, JobUpdate)]
        if isinstance(first, Telemetry):
            # The next report brings what the store did not take of this one.
            self._guarded(lambda: dispatcher.receive(engine_id, first))
        elif len(messages) == 1:
            self._retried(lambda: dispatcher.receive(engine_id, first))
        elif not self._retried(lambda: dispatcher.receive_metrics(engine_id, metrics)):
            # One that the store cannot take is not to take the others with it.
            for message in metrics:
                self._retried(functools.partial(dispatcher.receive, engine_id, message))

    def _retried(self, act: Callable[[], T]) -> T | None:
        """Do it, again while the store fails; None when it could not be done. A fault of ours must not end the thread
        that follows the engine, so it is logged and left behind."""
        while not self._stopping.is_set():
            try:
                return act()
            except LeaseLost:
                raise
            except OUTAGE as error:
                logger.warning("the store did not answer, it is tried again: %s", error)
                time.sleep(_RETRY_S)
            except Exception:
                logger.exception("the dispatcher met a fault")
                return None
        return None


def _together(arrived: Iterable[tuple[str, FromEngine]]) -> Iterator[tuple[str, list[FromEngine]]]:
    """By engine, in order: metrics of one job and token that came one after the other together, all else alone."""

    def series(received: tuple[int, tuple[str, FromEngine]]) -> tuple[object, ...]:
        number, (engine_id, message) = received
        if isinstance(message, JobUpdate) and message.kind == "metric":
            return engine_id, message.job_id, message.token
        return (number,)

    for _, group in itertools.groupby(enumerate(arrived), series):
        received = [one for _, one in group]
        yield received[0][0], [message for _, message in received]
