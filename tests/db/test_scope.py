"""A session of a tenant sees, counts, changes and deletes that tenant's rows only, however it asks."""

from __future__ import annotations

import pytest
from sqlalchemy import delete, func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import aliased

from db import adapters, datasets
from db.adapters import AdapterRecord
from db.base import now
from db.datasets import DatasetRecord
from db.scope import DEFAULT_TENANT, Scope, all_tenants, home, sees
from db.store import Store


def dataset(tenant: str, name: str = "rows") -> DatasetRecord:
    return DatasetRecord(
        id=f"ds-{tenant}-{name}",
        tenant=tenant,
        name=name,
        version=1,
        created_at=now(),
        bytes=1,
        sha256="0" * 64,
        report={},
    )


@pytest.fixture
def both(store: Store) -> Store:
    """A store in which two tenants have a data set of one name, and each an adapter."""
    with store.write() as session:
        session.add_all([dataset("a"), dataset("b")])
        adapters.claim(session, "of-a", now(), "a")
        adapters.claim(session, "of-b", now(), "b")
    return store


def of(store: Store, tenant: str, everything: bool = False) -> Store:
    return store.within(Scope(tenant, everything), None)


def test_every_way_to_read_is_kept_to_the_tenant(both: Store) -> None:
    with of(both, "a").read() as session:
        assert [row.tenant for row in session.scalars(select(DatasetRecord))] == ["a"]
        assert session.scalars(select(DatasetRecord.id)).all() == ["ds-a-rows"]
        assert session.scalar(select(func.count()).select_from(DatasetRecord)) == 1
        assert session.scalar(select(func.max(DatasetRecord.version)).where(DatasetRecord.tenant == "b")) is None
        assert session.get(AdapterRecord, "of-b") is None
        assert session.get(AdapterRecord, "of-a") is not None
        other = aliased(DatasetRecord)
        pairs = session.execute(select(DatasetRecord.id, other.id).join(other, other.name == DatasetRecord.name)).all()
        assert [tuple(pair) for pair in pairs] == [("ds-a-rows", "ds-a-rows")]
        assert session.scalars(select(DatasetRecord.id).where(DatasetRecord.id.in_(select(other.id)))).all() == [
            "ds-a-rows"
        ]


def test_every_way_to_change_is_kept_to_the_tenant(both: Store) -> None:
    with of(both, "a").write() as session:
        session.execute(update(DatasetRecord).values(bytes=7))
        session.execute(delete(AdapterRecord))
    with both.read() as session:
        found = {row.tenant: row.bytes for row in session.execute(select(DatasetRecord.tenant, DatasetRecord.bytes))}
        assert found == {"a": 7, "b": 1}
        assert session.scalars(select(AdapterRecord.name)).all() == ["of-b"]


def test_two_tenants_do_not_see_each_other_whatever_was_asked_before(both: Store) -> None:
    for tenant in ("a", "b", "a", "c"):
        with of(both, tenant).read() as session:
            found = session.scalars(select(DatasetRecord.tenant)).all()
            assert found == ([tenant] if tenant != "c" else [])


def test_a_name_means_the_sessions_own_tenants(both: Store) -> None:
    for tenant in ("a", "b"):
        with of(both, tenant, everything=True).read() as session:
            found = datasets.find(session, "rows")
            assert found is not None
            assert found.tenant == tenant
    with of(both, "c").read() as session:
        assert datasets.find(session, "rows") is None
        assert datasets.last_version(session, "rows") == 0


def test_without_a_scope_all_is_seen_and_the_default_tenant_is_meant(both: Store) -> None:
    with both.read() as session:
        assert home(session) == DEFAULT_TENANT
        assert len(session.scalars(select(DatasetRecord)).all()) == 2
        assert sees(session, "a")


def test_what_must_look_beyond_says_so(both: Store) -> None:
    with of(both, "a").read() as session:
        counted = session.scalar(select(func.count()).select_from(DatasetRecord), execution_options=all_tenants())
        assert counted == 2
        assert adapters.taken(session, "of-b")
        assert not adapters.taken(session, "of-a")
        assert not adapters.taken(session, "free")
        assert not sees(session, "b")


def test_a_name_may_be_two_tenants_but_no_version_twice_one_tenants(both: Store) -> None:
    with pytest.raises(IntegrityError), both.write() as session:
        again = dataset("a")
        again.id = "ds-again"
        session.add(again)
        session.flush()
