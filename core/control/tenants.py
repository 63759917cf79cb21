"""Tenants and users: who there is, and who may do what."""

from __future__ import annotations

from sqlalchemy.orm import Session

from core.api import tenant_schemas as schemas
from core.control.context import Control, new_id
from core.control.principal import Principal
from core.errors import Conflict, NotFound
from db import tenants as rows
from db.base import now
from db.scope import DEFAULT_TENANT
from db.tenants import TenantRecord, UserRecord


def me(principal: Principal) -> schemas.Me:
    return schemas.Me.model_validate(
        {
            "user": principal.user,
            "tenant": principal.tenant,
            "role": principal.role,
            "scopes": sorted(principal.scopes),
            "platform_admin": principal.is_platform_admin,
            "token_id": principal.token_id,
        }
    )


# ---- tenants ---------------------------------------------------------------------------------------------------------


def everyone(control: Control) -> list[schemas.Tenant]:
    """By name: all for an admin of the platform, else the own one."""
    own = None if control.principal.is_platform_admin else control.principal.tenant
    with control.store.read() as session:
        return [_tenant(record) for record in rows.everyone(session) if own in (None, record.name)]


def create(control: Control, body: schemas.TenantCreate) -> schemas.Tenant:
    control.principal.require_platform("admin")
    with control.store.write() as session:
        if rows.find(session, body.name) is not None:
            raise Conflict("name_taken", f"there is a tenant {body.name} already; give another name", "name")
        record = TenantRecord(name=body.name, created_at=now(), suspended=False)
        session.add(record)
        return _tenant(record)


def update(control: Control, name: str, patch: schemas.TenantPatch) -> schemas.Tenant:
    """Suspend a tenant, or let it go on. What it has stays, and its running jobs go on."""
    control.principal.require_platform("admin")
    with control.store.write() as session:
        record = _require(session, name)
        if name == DEFAULT_TENANT and patch.suspended:
            raise Conflict("own_tenant", f"{name} is the platform's own tenant and cannot be suspended", "name")
        record.suspended = patch.suspended
        return _tenant(record)


def _require(session: Session, name: str) -> TenantRecord:
    record = rows.find(session, name)
    if record is None:
        raise NotFound("tenant_not_found", f"there is no tenant {name}; `harli tenants` lists them", "tenant")
    return record


def _tenant(record: TenantRecord) -> schemas.Tenant:
    return schemas.Tenant.model_validate(record, from_attributes=True)


# ---- users -----------------------------------------------------------------------------------------------------------


def users(control: Control, tenant: str | None) -> list[schemas.User]:
    """By tenant and name, of a tenant or of all that may be seen."""
    with control.store.read() as session:
        return [_user(record) for record in rows.users(session, tenant)]


def create_user(control: Control, body: schemas.UserCreate) -> schemas.User:
    tenant = body.tenant or control.principal.tenant
    if tenant != control.principal.tenant:
        control.principal.require_platform("admin")
    with control.store.write() as session:
        _require(session, tenant)
        if rows.user_named(session, tenant, body.name) is not None:
            raise Conflict("name_taken", f"tenant {tenant} has a user {body.name} already; give another name", "name")
        record = UserRecord(
            id=new_id("user"), tenant=tenant, name=body.name, role=body.role, created_at=now(), disabled=False
        )
        session.add(record)
        return _user(record)


def update_user(control: Control, user_id: str, patch: schemas.UserPatch) -> schemas.User:
    """Change role or leave to enter; in force for the user's tokens at once. Nobody locks out themselves."""
    with control.store.write() as session:
        record = rows.find_user(session, user_id)
        if record is None:
            raise NotFound("user_not_found", f"there is no user {user_id}; `harli users` lists them", "user_id")
        if (record.tenant, record.name) == (control.principal.tenant, control.principal.user):
            raise Conflict(
                "own_user", f"{record.name} is you; have another admin change your role or disable you", "user_id"
            )
        if patch.role is not None:
            record.role = patch.role
        if patch.disabled is not None:
            record.disabled = patch.disabled
        return _user(record)


def _user(record: UserRecord) -> schemas.User:
    return schemas.User.model_validate(record, from_attributes=True)
