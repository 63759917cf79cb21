"""Two kinds of transaction: reads that cannot write, writes that come one after the other."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text, update
from sqlalchemy.exc import DBAPIError, IntegrityError, StatementError

from db import changes, jobs, leases, quotas, telemetry
from db.base import now
from db.changes import ChangeRecord
from db.store import Store
from db.tenants import TokenRecord


def test_a_read_transaction_cannot_write(store: Store) -> None:
    with pytest.raises(DBAPIError), store.read() as session:
        session.execute(text("DELETE FROM jobs"))


def test_a_connection_that_read_can_write_later(store: Store) -> None:
    for _ in range(3):
        with store.read() as session:
            assert jobs.counts(session) == {}
        with store.write() as session:
            leases.next_token(session, "x", "me")


@pytest.mark.postgres
@pytest.mark.parametrize("store_url", ["postgres"], indirect=True)
def test_connections_that_the_server_has_closed_are_not_used_again(store: Store) -> None:
    with store.read() as session, store.read() as another:
        assert jobs.counts(session) == jobs.counts(another) == {}
    with store.write() as session:
        leases.next_token(session, "x", "me")
    others = text(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    with store.read() as session:
        assert session.scalars(others).all() == [True, True]
    with store.read() as session, store.read() as another:
        assert jobs.counts(session) == jobs.counts(another) == {}
    with store.write() as session:
        assert leases.next_token(session, "x", "me") == 2


def test_an_exception_rolls_everything_back(store: Store) -> None:
    with pytest.raises(RuntimeError), store.write() as session:
        leases.next_token(session, "x", "me")
        session.flush()
        raise RuntimeError
    with store.read() as session:
        assert session.scalar(text("SELECT count(*) FROM leases")) == 0


def test_read_then_write_from_many_threads_loses_no_update(store: Store) -> None:
    """The pattern that fails at once in deferred SQLite transactions, whatever busy_timeout says."""

    def bump() -> None:
        for _ in range(20):
            with store.write() as session:
                leases.next_token(session, "counter", "anyone")

    threads = [threading.Thread(target=bump) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with store.read() as session:
        assert session.scalar(text("SELECT token FROM leases WHERE name = 'counter'")) == 160


def test_listeners_hear_of_commits_only(store: Store) -> None:
    heard: list[frozenset[str]] = []
    store.on_commit(heard.append)
    with pytest.raises(RuntimeError), store.write() as session:
        leases.next_token(session, "x", "me")
        raise RuntimeError
    assert heard == []
    with store.write() as session:
        leases.next_token(session, "x", "me")
    assert heard == [{"leases"}]


def test_listeners_hear_which_tables_were_written_to(store: Store) -> None:
    heard: list[frozenset[str]] = []
    store.on_commit(heard.append)
    with store.write() as session:
        leases.next_token(session, "x", "me")
        session.add(ChangeRecord(time=now(), topic="jobs", kind="x", ref=None, data={}))
    with store.write() as session:
        changes.after(session, 0, 1)[0].kind = "y"
    with store.write() as session:
        session.delete(changes.after(session, 0, 1)[0])
    with store.write() as session:
        changes.drop_before(session, now())
    with store.write() as session:
        session.execute(update(TokenRecord).values(last_used_at=now()))
    with store.write() as session:
        telemetry.put(session, 1, [(now(), {}, b"")])
    with store.write() as session:
        assert not leases.holds(session, "x", "you", 1), "who only looks has written nothing"
    assert heard == [
        {"leases", "changes"},
        {"changes"},
        {"changes"},
        {"changes"},
        {"api_tokens"},
        {"telemetry"},
        set(),
    ]


def test_what_a_running_job_reports_of_itself_is_no_news_and_its_state_is(store: Store) -> None:
    heard: list[frozenset[str]] = []
    with store.write() as session:
        session.add(
            jobs.JobRecord(
                id="job-1", name="one", state="running", spec={}, dataset_id="ds-1", dataset_name="rows",
                adapter_name="bot", created_at=now(), state_since=now(),
            )
        )  # fmt: skip
    store.on_commit(heard.append)
    with store.write() as session:
        jobs.put_figures(session, "job-1", {**dict.fromkeys(jobs.FIGURES, 0), "loss": 1.5})
    with store.write() as session:
        job = jobs.find(session, "job-1")
        assert job is not None and job.loss == 1.5
        job.state = "paused"
    assert heard == [set(), {"jobs"}]


def test_what_a_statement_of_a_table_writes_is_noted_where_it_is_news(store: Store) -> None:
    job = jobs.JobRecord(
        id="job-1", name="one", state="running", spec={}, dataset_id="ds-1", dataset_name="rows", adapter_name="bot",
        created_at=now(), state_since=now(),
    )  # fmt: skip
    with store.write() as session:
        session.add(job)
    heard: list[frozenset[str]] = []
    store.on_commit(heard.append)
    measured = dict.fromkeys(jobs.MEASURED)
    for write in (
        lambda session: jobs.put_metrics(session, "job-1", [{"step": 1, "time": now(), **measured}]),
        lambda session: jobs.add_log(session, "job-1", [(now(), "step 1")]),
        lambda session: changes.add_many(session, "jobs", "metric", "job-1", "default", [{"step": 1}]),
        lambda session: quotas.add(session, "default", now().date(), 5),
        lambda session: telemetry.put(session, 1, [(now(), {}, b"")]),
    ):
        with store.write() as session:
            write(session)
    assert heard == [{"job_metrics"}, {"job_logs"}, {"changes"}, {"finetune_usage"}, {"telemetry"}]


def test_foreign_keys_and_checks_are_enforced(store: Store) -> None:
    with pytest.raises(IntegrityError), store.write() as session:
        session.add(jobs.JobEventRecord(job_id="missing", time=now(), kind="x", message=""))
    with pytest.raises(IntegrityError), store.write() as session:
        session.execute(text("INSERT INTO engines VALUES ('e', 'dancing', '{}', '2026-01-01', '2026-01-01', 1, '[]')"))


def test_times_come_back_in_utc_and_need_a_zone(store: Store) -> None:
    time = datetime(2026, 3, 29, 2, 30, 0, 123456, tzinfo=UTC)
    with store.write() as session:
        session.add(ChangeRecord(time=time, topic="jobs", kind="x", ref=None, data={}))
    with store.read() as session:
        assert session.query(ChangeRecord).one().time == time
    with pytest.raises(StatementError, match="no zone"), store.write() as session:
        session.add(ChangeRecord(time=datetime(2026, 1, 1), topic="jobs", kind="x", ref=None, data={}))


def test_a_lease_has_one_holder_and_a_token_that_grows(store: Store) -> None:
    with store.write() as session:
        first = leases.acquire(session, "dispatcher", "a", 60)
        assert leases.acquire(session, "dispatcher", "b", 60) is None
        assert leases.acquire(session, "dispatcher", "a", 60) == first
        leases.release(session, "dispatcher", "b")
        assert leases.acquire(session, "dispatcher", "b", 60) is None
        leases.release(session, "dispatcher", "a")
        second = leases.acquire(session, "dispatcher", "b", 0)
        assert first is not None and second is not None and second > first
        assert not leases.holds(session, "dispatcher", "a", first)
    with store.write() as session:
        third = leases.acquire(session, "dispatcher", "c", 60)
        assert third is not None and third > second, "a lease that ran out may be taken"
        assert not leases.holds(session, "dispatcher", "b", second)


@pytest.mark.parametrize("lives", [True, False])
def test_a_lease_from_before_the_clock_was_set_back_lasts_no_longer_than_one_of_now(store: Store, lives: bool) -> None:
    def acquire(holder: str) -> int | None:
        with store.write() as session:
            return leases.acquire(session, "dispatcher", holder, 0.5)

    first = acquire("a")
    with store.write() as session:
        session.get_one(leases.LeaseRecord, "dispatcher").expires_at += timedelta(hours=1)
    assert acquire("b") is None, "who holds it has the time to renew it"
    for _ in range(4):
        time.sleep(0.2)
        if lives:
            assert acquire("a") == first
            assert acquire("b") is None
    second = acquire("b")
    assert (second is None) if lives else (second is not None and first is not None and second > first)
