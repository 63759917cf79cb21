"""Operations: work that a caller wants to watch and may cancel. Whoever does it reports through a `Work`; the store
tells every API process how far it is, and brings a request to cancel to the one that works."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime, timedelta
from pathlib import Path

from sqlalchemy.orm import Session

from core.api import schemas
from core.control import presence
from core.control.context import Control
from core.control.elapsed import Elapsed
from core.errors import Conflict, HarliError, Invalid, NotFound, full_disk
from db import operations as rows
from db.base import now
from db.operations import OperationRecord

logger = logging.getLogger(__name__)
_TELL_S = 0.3
_SILENCE_S = 600.0
_KEPT = timedelta(days=1)
_ENDED = "ended, or was killed, before it was through"


class Cancelled(Conflict):
    """The caller gave up, or someone cancelled it; nothing is left of the work."""


class Work:
    """What is being done, in the hands of the one who does it. `operation_id` None: nobody watches, and only `cancel`
    ends it early."""

    def __init__(self, control: Control, operation_id: str | None, subject: str) -> None:
        self.id = operation_id
        self.result: str | None = None
        self._control = control
        self._subject = subject
        self._cancelled = threading.Event()
        self._told = 0.0

    def cancel(self) -> None:
        """From another thread: the next `progress` raises Cancelled."""
        self._cancelled.set()

    def progress(self, done: int, total: int) -> None:
        """How many bytes are done; raises Cancelled when that was asked for."""
        if self.id is not None and time.monotonic() - self._told >= _TELL_S:
            self._told = time.monotonic()
            with self._control.store.write() as session:
                record = rows.find(session, self.id)
                if record is None or record.cancel or record.state != "running":  # it may have been given up meanwhile
                    self._cancelled.set()
                else:
                    record.done, record.total, record.updated_at = done, total, now()
        if self._cancelled.is_set():
            raise Cancelled("cancelled", f"{self._subject} was cancelled after {done:,} of {total:,} bytes", None)


@contextmanager
def ending(control: Control, work: Work) -> Iterator[None]:
    """Around work whose operation has begun: it ends as the block ends."""
    try:
        yield
    except BaseException as error:
        _end(control, work, error)
        raise
    _end(control, work, None)


def require_new(control: Control, operation_id: str) -> None:
    """Raise Conflict when there is an operation of the id already."""
    with control.store.read() as session:
        _require_new(session, operation_id)


def _require_new(session: Session, operation_id: str) -> None:
    if session.get(OperationRecord, operation_id) is not None:
        raise Conflict("operation_exists", f"there is an operation {operation_id}; take a new id", "operation")


def begin(control: Control, kind: str, subject: str, operation_id: str | None) -> None:
    """Write down that it runs."""
    if operation_id is None:
        return
    with control.store.write() as session:
        _require_new(session, operation_id)
        time_ = now()
        session.add(
            OperationRecord(
                id=operation_id,
                tenant=control.principal.tenant,
                kind=kind,
                subject=subject[:200],
                state="running",
                worker=presence.name(control.data_dir),
                created_at=time_,
                updated_at=time_,
            )
        )


def _end(control: Control, work: Work, error: BaseException | None) -> None:
    if work.id is None:
        return
    with control.store.write() as session:
        record = rows.find(session, work.id)
        if record is None or (error is not None and record.state != "running"):
            return
        record.updated_at, record.result = now(), work.result
        if error is None:  # whoever gave it up meanwhile was wrong: what came of it is there
            record.state, record.done, record.error = "succeeded", record.total, None
        elif isinstance(error, Cancelled):
            record.state = "cancelled"
        else:
            record.state = "failed"
            error = full_disk(error) or error
            if not isinstance(error, HarliError):
                logger.error("%s met a fault", record.subject, exc_info=error)
            detail = schemas.OperationError(code="internal", message="it met a fault; the API's log has it")
            if isinstance(error, HarliError):
                detail = schemas.OperationError(
                    code=error.code,
                    message=error.message[:2000],
                    param=error.param,
                    status=error.status,
                    report=error.report if isinstance(error, Invalid) else None,
                )
            record.error = detail.model_dump(mode="json")


# ---- looking ---------------------------------------------------------------------------------------------------------


def get(control: Control, operation_id: str) -> schemas.Operation:
    with control.store.read() as session:
        return view(control, _require(session, operation_id))


def page(control: Control, kind: str | None, limit: int) -> list[schemas.Operation]:
    with control.store.read() as session:
        return [view(control, record) for record in rows.page(session, kind, limit)]


def view(control: Control, record: OperationRecord) -> schemas.Operation:
    """As its row says; failed when the process that worked on it has ended, whether `tidy` has written that down by now
    or not."""
    found = schemas.Operation.model_validate(record, from_attributes=True)
    if record.state == "running" and presence.runs(control.data_dir, record.worker) is False:
        return found.model_copy(update={"state": "failed", "error": _lost(record, _ENDED)})
    return found


def _lost(record: OperationRecord, how: str) -> schemas.OperationError:
    again = {"dataset": "upload the file again", "merge": "merge it again"}[record.kind]
    message = f"the API process that worked on it ({record.worker}) {how}; {again}"
    return schemas.OperationError(code="worker_gone", message=message, status=503)


def cancel(control: Control, operation_id: str) -> schemas.Operation:
    """Ask for its end; it ends within a second. Nothing happens to one that has ended."""
    with control.store.write() as session:
        record = _require(session, operation_id)
        if record.state == "running":
            record.cancel = True
        return view(control, record)


def _require(session: Session, operation_id: str) -> OperationRecord:
    record = rows.find(session, operation_id)
    if record is None:
        raise NotFound(
            "operation_not_found", f"there is no operation {operation_id}; they are forgotten after a day", "operation"
        )
    return record


# ---- what came of it -------------------------------------------------------------------------------------------------


def folder(control: Control, operation_id: str) -> Path:
    """Where an operation puts files."""
    return control.data_dir / "exports" / operation_id


def tidy(
    control: Control, write: Callable[[], AbstractContextManager[Session]], silent: Elapsed[tuple[str, datetime]]
) -> None:
    """Forget operations that ended a day ago, with their files; end those whose process is gone. Whether one of another
    machine is can only be told by its silence: `silent` is asked for that at every call."""
    ended = presence.ended(control.data_dir)  # ahead of the rows: these processes begin nothing more
    with write() as session:
        doomed = rows.ended(session, now() - _KEPT)
        for record in doomed:
            session.delete(record)
        running = {record: presence.runs(control.data_dir, record.worker) for record in rows.running(session)}
        unknown = silent.seconds((record.id, record.updated_at) for record, runs in running.items() if runs is None)
        for record, runs in running.items():
            silent_s = unknown.get((record.id, record.updated_at), 0.0)
            if runs is False or silent_s > _SILENCE_S:
                how = _ENDED if runs is False else f"has not been heard of for {silent_s / 60:.0f} minutes"
                record.state, record.error, record.updated_at = "failed", _lost(record, how).model_dump(), now()
    presence.forget(control.data_dir, ended)
    for record in doomed:
        shutil.rmtree(folder(control, record.id), ignore_errors=True)
