"""Aliases: names for versions of an adapter that applications keep calling while the version behind them changes.

The engine serves what an alias stands for under ``name@alias``, so that any OpenAI client can call it. Promoting loads
the next version beside the one before, which answers until the next one does and then ends the requests that it has.
"""

from __future__ import annotations

import re

from sqlalchemy.orm import Session

from core.api import schemas
from core.control import adapters
from core.control.context import Control
from core.errors import Conflict, NotFound
from db import adapters as rows
from db import changes
from db.adapters import AdapterAliasRecord, AdapterVersionRecord
from db.base import now

_KEPT = 20
_REFERENCE = re.compile(r"(?P<name>[^@]*)(?:@(?P<version>\d+)|@(?P<alias>.+))?")


def promote(control: Control, name: str, alias: str, version: int | None) -> schemas.Adapter:
    """Let the alias, made if there is none, stand for a version (None: the newest)."""
    with control.store.write() as session:
        adapter = adapters.require(session, name)
        row = adapters.require_version(adapter, version)
        adapters.require_servable(session, row)
        record = rows.alias(session, name, alias)
        if record is None:
            record = AdapterAliasRecord(
                name=name, alias=alias, tenant=adapter.tenant, deployment="none", deleted=False, history=[]
            )
            session.add(record)
        elif record.deleted:
            record.deleted, record.history = False, []
        elif record.wanted_version not in (None, row.version):
            record.history = [*record.history, record.wanted_version][-_KEPT:]
        _point(session, record, row.version, "promoted")
        return adapters.view(session, adapter)


def roll_back(control: Control, name: str, alias: str) -> schemas.Adapter:
    """Let the alias stand for the version that it was before, of those that there still are."""
    with control.store.write() as session:
        adapter = adapters.require(session, name)
        record = _require(session, name, alias)
        there = {row.version for row in adapter.versions}
        earlier = [version for version in record.history if version in there]
        if not earlier:
            raise Conflict(
                "no_earlier_version",
                f"{record.address} has stood for no other version that there still is; promote the one that you want",
                "alias",
            )
        adapters.require_servable(session, adapters.require_version(adapter, earlier[-1]))
        record.history = earlier[:-1]
        _point(session, record, earlier[-1], "rolled_back")
        return adapters.view(session, adapter)


def delete(control: Control, name: str, alias: str) -> None:
    """Take the alias away; the engine finishes the requests that use it first."""
    with control.store.write() as session:
        record = _require(session, name, alias)
        adapters.let_go(session, record)
        changes.add(session, "adapters", "alias_deleted", name, tenant=record.tenant, alias=alias)


def resolved(session: Session, reference: str, param: str = "adapter") -> AdapterVersionRecord:
    """The version that ``name`` (the newest), ``name@version`` or ``name@alias`` stands for. Raises NotFound."""
    found = _REFERENCE.fullmatch(reference)
    if found is None:
        raise NotFound(
            "adapter_not_found", f"there is no adapter {reference!r}; give name, name@2 or name@alias", param
        )
    adapter = adapters.require(session, found["name"])
    if found["alias"] is not None:
        return adapters.require_version(adapter, _require(session, found["name"], found["alias"]).wanted_version)
    return adapters.require_version(adapter, int(found["version"][:9]) if found["version"] else None)


def numbered(session: Session, reference: str) -> str:
    """``name@alias`` as ``name@version``; what is no alias that there is stays as it is."""
    name, _, alias = reference.partition("@")
    record = rows.alias(session, name, alias) if alias else None
    return f"{name}@{record.wanted_version}" if record is not None and not record.deleted else reference


def _require(session: Session, name: str, alias: str) -> AdapterAliasRecord:
    record = rows.alias(session, name, alias)
    if record is None or record.deleted:
        there = ", ".join(found.alias for found in rows.aliases(session, [name])) or "none"
        raise NotFound("alias_not_found", f"adapter {name} has no alias {alias}; there are: {there}", "alias")
    return record


def _point(session: Session, record: AdapterAliasRecord, version: int, kind: str) -> None:
    record.updated_at = now()
    adapters.want(session, record, version)
    session.flush()
    changes.add(session, "adapters", kind, record.name, tenant=record.tenant, alias=record.alias, version=version)
