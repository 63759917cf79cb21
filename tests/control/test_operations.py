"""Operations: progress, ends of every kind, cancelling, forgetting."""

from __future__ import annotations

from datetime import timedelta

import pytest

from core.control import operations
from core.control.context import Control
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


def test_ended_ones_are_forgotten_with_their_files_and_silent_ones_have_failed(control: Control) -> None:
    run(control, operation_id="old-00001")
    operations.begin(control, "merge", "captain@1", "lost-0001")
    run(control, operation_id="new-00001")
    folder = operations.folder(control, "old-00001")
    folder.mkdir(parents=True)
    with control.store.write() as session:
        session.get_one(OperationRecord, "old-00001").updated_at = now() - timedelta(days=2)
        session.get_one(OperationRecord, "lost-0001").updated_at = now() - timedelta(hours=1)
    operations.tidy(control, control.store.write)
    assert {found.id: found.state for found in operations.page(control, None, 10)} == {
        "lost-0001": "failed", "new-00001": "succeeded",
    }  # fmt: skip
    assert not folder.exists()
