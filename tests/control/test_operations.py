"""Operations: progress, ends of every kind, cancelling, forgetting."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta

import pytest

from core.config import Settings
from core.control import operations, presence
from core.control.context import Control
from core.control.elapsed import Elapsed
from core.control.operations import Cancelled, Work
from core.errors import Conflict, Invalid, NotFound
from db.base import now
from db.operations import OperationRecord


def run(control: Control, error: BaseException | None = None, operation_id: str = "check-001") -> Work:
    operations.begin(control, "dataset", "rows.jsonl", operation_id)
    work = Work(control, operation_id, "the check")
    try:
        with operations.ending(control, work):
            work.progress(10, 100)
            if error is not None:
                raise error
    except BaseException as raised:
        assert raised is error
    return work


def test_progress_is_told_and_the_end_is_what_the_work_came_to(control: Control) -> None:
    run(control)
    found = operations.get(control, "check-001")
    assert (found.state, found.done, found.total) == ("succeeded", 100, 100)
    run(control, Invalid("broken_json", "line 2", "file"), "check-002")
    failed = operations.get(control, "check-002")
    assert failed.error is not None
    assert (failed.state, failed.done, failed.error.code) == ("failed", 10, "broken_json")
    run(control, RuntimeError("secret"), "check-003")
    fault = operations.get(control, "check-003").error
    assert fault is not None
    assert (fault.code, "secret" in fault.message) == ("internal", False)
    assert [found.id for found in operations.page(control, "dataset", 2)] == ["check-003", "check-002"]


def test_what_is_cancelled_ends_at_its_next_report(control: Control) -> None:
    operations.begin(control, "merge", "captain@1", "merge-001")
    work = Work(control, "merge-001", "the merge")
    with pytest.raises(Cancelled, match="cancelled after 10 of 100 bytes"), operations.ending(control, work):
        operations.cancel(control, "merge-001")
        work.progress(10, 100)
    assert operations.get(control, "merge-001").state == "cancelled"
    assert operations.cancel(control, "merge-001").state == "cancelled"


def test_without_an_id_only_its_caller_can_cancel(control: Control) -> None:
    work = Work(control, None, "the check")
    with operations.ending(control, work):
        work.progress(1, 2)
    work.cancel()
    with pytest.raises(Cancelled):
        work.progress(2, 2)
    assert operations.page(control, None, 10) == []


def test_an_id_is_used_once(control: Control) -> None:
    run(control)
    with pytest.raises(Conflict, match="there is an operation check-001"):
        operations.begin(control, "dataset", "rows.jsonl", "check-001")
    with pytest.raises(NotFound, match="no operation check-009"):
        operations.cancel(control, "check-009")


# Begins an operation, and works on it once a line comes.
WORKER = """
import sys
from core.config import Settings
from core.control import operations
from core.control.context import open_control
from core.control.operations import Work

control = open_control(Settings.model_validate_json(sys.argv[1]))
operations.begin(control, "merge", "captain@1", sys.argv[2])
work = Work(control, sys.argv[2], "the merge")
print("begun", flush=True)
with operations.ending(control, work):
    sys.stdin.readline()
    work.progress(10, 100)
    work.result = "done.tar"
"""


@contextmanager
def worker(settings: Settings, operation_id: str) -> Iterator[subprocess.Popen[str]]:
    """An API process that has begun an operation."""
    command = [sys.executable, "-c", WORKER, settings.model_dump_json(), operation_id]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "begun\n"
            yield process
        finally:
            process.kill()


def test_the_operation_of_a_process_that_was_killed_has_failed_and_those_of_others_go_on(
    control: Control, settings: Settings
) -> None:
    operations.begin(control, "dataset", "rows.jsonl", "ours-0001")
    with worker(settings, "lost-0001") as killed, worker(settings, "still-001") as stopped:
        stopped.send_signal(signal.SIGSTOP)
        assert operations.get(control, "lost-0001").state == "running"
        killed.kill()
        killed.wait()
        for written in (False, True):
            found = {operation.id: operation for operation in operations.page(control, None, 10)}
            states = {operation_id: operation.state for operation_id, operation in found.items()}
            assert states == {"ours-0001": "running", "lost-0001": "failed", "still-001": "running"}
            assert found["lost-0001"] == operations.get(control, "lost-0001")
            error = found["lost-0001"].error
            assert error is not None
            assert (error.code, error.status) == ("worker_gone", 503)
            assert f"-{killed.pid}-" in error.message and error.message.endswith("was through; merge it again")
            if not written:
                operations.tidy(control, control.store.write, Elapsed())
        stopped.send_signal(signal.SIGCONT)
        stopped.communicate("go on\n")
    found = {operation.id: operation for operation in operations.page(control, None, 10)}
    assert (found["still-001"].state, found["still-001"].result) == ("succeeded", "done.tar")


def test_of_processes_that_have_ended_nothing_is_left(control: Control, settings: Settings) -> None:
    operations.begin(control, "dataset", "rows.jsonl", "ours-0001")
    with worker(settings, "lost-0001"):
        assert len(list((control.data_dir / "run" / "processes").glob("*/*"))) == 2
    operations.tidy(control, control.store.write, Elapsed())
    (left,) = (control.data_dir / "run" / "processes").glob("*/*")
    assert left.name == presence.name(control.data_dir)
    assert not list(control.uploads.iterdir())


def test_one_on_another_machine_has_failed_when_nothing_was_heard_of_it_for_10_minutes(control: Control) -> None:
    operations.begin(control, "dataset", "rows.jsonl", "other-001")
    work = Work(control, "other-001", "the check")
    with control.store.write() as session:
        session.get_one(OperationRecord, "other-001").worker = "elsewhere-77-00"
    seconds = 0.0
    silent: Elapsed[tuple[str, datetime]] = Elapsed(lambda: seconds)
    states = []
    with pytest.raises(Cancelled), operations.ending(control, work):
        for seconds in (0.0, 590.0, 1180.0, 1790.0):
            operations.tidy(control, control.store.write, silent)
            states.append(operations.get(control, "other-001").state)
            if seconds == 590.0:
                work.progress(10, 100)
        Work(control, "other-001", "the check").progress(20, 100)
    assert states == ["running", "running", "running", "failed"]
    error = operations.get(control, "other-001").error
    assert error is not None
    assert error.code == "worker_gone" and "(elsewhere-77-00) has not been heard of for 10 minutes" in error.message
    with operations.ending(control, work):
        work.result = "ds-1"
    found = operations.get(control, "other-001")
    assert (found.state, found.result, found.error) == ("succeeded", "ds-1", None), "it was given up wrongly"


def test_ended_ones_are_forgotten_with_their_files(control: Control) -> None:
    run(control, operation_id="old-00001")
    run(control, operation_id="new-00001")
    folder = operations.folder(control, "old-00001")
    folder.mkdir(parents=True)
    with control.store.write() as session:
        session.get_one(OperationRecord, "old-00001").updated_at = now() - timedelta(days=2)
    operations.tidy(control, control.store.write, Elapsed())
    assert [found.id for found in operations.page(control, None, 10)] == ["new-00001"]
    assert not folder.exists()
