"""A job's history pages the same way on both databases."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from db import openai as rows
from db.datasets import DatasetRecord
from db.jobs import JobEventRecord, JobMetricRecord, JobRecord
from db.store import Store

START = datetime(2026, 1, 1, tzinfo=UTC)


def test_events_and_metrics_are_one_history_newest_first(store: Store) -> None:
    with store.write() as session:
        session.add(
            JobRecord(
                id="job-1", name="j", state="running", spec={}, dataset_id="ds-1", dataset_name="d", adapter_name="a",
                created_at=START, state_since=START,
            )
        )  # fmt: skip
        session.flush()
        # Events and metrics of the same second, and of the same microsecond.
        for number in range(4):
            time = START + timedelta(seconds=number // 2)
            session.add(JobEventRecord(job_id="job-1", time=time, kind="remark", message=str(number)))
            session.add(JobMetricRecord(job_id="job-1", step=number, time=time, loss=float(number)))
    with store.read() as session:
        whole = rows.history(session, "job-1", 100, None)
        assert len(whole) == 8
        assert whole == sorted(whole, reverse=True)
        paged: list[rows.Happened] = []
        while page := rows.history(session, "job-1", 3, paged[-1] if paged else None):
            paged += page
        assert paged == whole
        assert rows.history(session, "job-2", 10, None) == []
        assert rows.metric_until(session, "job-1", 2) == (2.0, None)


def test_files_are_listed_in_both_orders(store: Store) -> None:
    with store.write() as session:
        for number in range(3):
            session.add(
                DatasetRecord(
                    id=f"ds-{number}", name="d", version=number + 1, created_at=START, bytes=1, sha256="0", report={}
                )
            )
            session.flush()
    with store.read() as session:
        first = rows.files(session, 2, None, True)
        assert [row.id for row in first] == ["ds-0", "ds-1"]
        assert [row.id for row in rows.files(session, 2, first[-1].seq, True)] == ["ds-2"]
        assert [row.id for row in rows.files(session, 5, first[-1].seq, False)] == ["ds-0"]
