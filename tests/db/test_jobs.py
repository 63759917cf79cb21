"""What listings cost: a tenant's jobs are found and counted without reading those of others, or whole rows."""

from __future__ import annotations

import pytest
from sqlalchemy import event

from db import jobs
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
