"""What listings cost: a tenant's jobs are found and counted without reading those of others, or whole rows."""

from __future__ import annotations

import pytest
from sqlalchemy import event

from db import jobs
from db.base import now
from db.scope import Scope
from db.store import Store


@pytest.mark.parametrize(
    ("scope", "index"),
    [(Scope("a"), "ix_jobs_tenant_state_seq"), (Scope("a", everything=True), "ix_jobs_state_seq")],
)
def test_jobs_are_counted_from_an_index_alone(sqlite_url: str, scope: Scope, index: str) -> None:
    store = Store(sqlite_url)
    asked: list[tuple[str, tuple[object, ...]]] = []
    event.listen(store.engine, "before_cursor_execute", lambda *given: asked.append((given[2], given[3])))
    with store.within(scope, None).read() as session:
        jobs.counts(session)
        statement, values = asked[-1]
        plan = session.connection().exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", values).all()
    store.close()
    assert any(f"USING COVERING INDEX {index}" in row[3] for row in plan), plan


@pytest.mark.parametrize(
    ("scope", "seen"), [(Scope("a"), ["a"]), (Scope("b"), ["b"]), (Scope("a", everything=True), ["b", "a"])]
)
def test_a_page_shows_the_scopes_own(store: Store, scope: Scope, seen: list[str]) -> None:
    time = now()
    with store.write() as session:
        for tenant in ("a", "b"):
            session.add(
                jobs.JobRecord(
                    id=f"job-{tenant}",
                    tenant=tenant,
                    name="x",
                    state="queued",
                    spec={},
                    dataset_id="ds",
                    dataset_name="rows",
                    adapter_name=tenant,
                    created_at=time,
                    state_since=time,
                )
            )
    with store.within(scope, None).read() as session:
        for before, state in ((None, None), (10, None), (None, "queued"), (10, "queued")):
            rows = jobs.page(session, ("tenant", "spec", "created_at"), 10, before, state)
            assert [row.tenant for row in rows] == seen
            assert {(row.spec, row.created_at) for row in rows} == {("{}", time)}
        assert jobs.page(session, ("tenant",), 10, 1, None) == []
        assert jobs.page(session, ("tenant",), 10, None, "running") == []
        assert len(jobs.page(session, ("tenant",), 1, None, None)) == 1
