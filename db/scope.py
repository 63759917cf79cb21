"""Whose rows a session sees. A session that was opened in a scope adds the condition to every query by itself, so that
no query can forget it; one without a scope (the dispatcher, migrations) sees all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import String, event
from sqlalchemy.orm import Mapped, ORMExecuteState, Session, mapped_column, with_loader_criteria

DEFAULT_TENANT = "default"
_KEY = "scope"
_ALL_TENANTS = "harli_all_tenants"


@dataclass(frozen=True)
class Scope:
    """`tenant`: whose names are meant, and who owns what is made. `everything`: rows of other tenants are seen too."""

    tenant: str
    everything: bool = False


class Owned:
    """Mixin of models whose rows belong to a tenant."""

    tenant: Mapped[str] = mapped_column(String(63), default=DEFAULT_TENANT)


def home(session: Session) -> str:
    """The tenant that a session works for; without a scope the default one."""
    scope: Scope | None = session.info.get(_KEY)
    return scope.tenant if scope is not None else DEFAULT_TENANT


def info(scope: Scope | None) -> dict[str, Any]:
    """What a session of this scope is opened with."""
    return {} if scope is None else {_KEY: scope}


def all_tenants() -> dict[str, Any]:
    """Execution options of the rare query that must look beyond the tenant: whether a name is free, how long the queue
    is. What it finds may be counted, never shown."""
    return {_ALL_TENANTS: True}


def sees(session: Session, tenant: str) -> bool:
    """Whether rows of a tenant are the session's to show."""
    scope: Scope | None = session.info.get(_KEY)
    return scope is None or scope.everything or scope.tenant == tenant


def only(session: Session) -> str | None:
    """The tenant whose rows alone are the session's to show; None when all are. For a query of a table, to which the
    condition is not added by itself."""
    scope: Scope | None = session.info.get(_KEY)
    return None if scope is None or scope.everything else scope.tenant


@event.listens_for(Session, "do_orm_execute")
def _own_rows_only(state: ORMExecuteState) -> None:
    scope: Scope | None = state.session.info.get(_KEY)
    if scope is None or scope.everything or state.is_column_load or state.is_insert:
        return
    if state.execution_options.get(_ALL_TENANTS, False):
        return
    tenant = scope.tenant
    state.statement = state.statement.options(
        with_loader_criteria(Owned, lambda cls: cls.tenant == tenant, include_aliases=True)
    )
