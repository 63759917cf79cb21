"""Tenants, users, API tokens, the audit log, and who one is."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Path, Query

from core.api import tenant_schemas as schemas
from core.api.depends import ControlDep, Cursor, Limit, PrincipalDep
from core.api.schemas import Moment, Page
from core.control import audit, tenants, tokens


def _admin(principal: PrincipalDep) -> None:
    principal.require("admin")


router = APIRouter(tags=["tenants"], dependencies=[Depends(_admin)])
me_router = APIRouter(tags=["tenants"])
OfTenant = Annotated[str | None, Query(max_length=63, description="only of this tenant; left out: of all you may see")]
Id = Annotated[str, Path(max_length=40)]


@me_router.get("/me", summary="Whom the token stands for")
def me(principal: PrincipalDep) -> schemas.Me:
    return tenants.me(principal)


@router.get("/tenants", summary="List tenants")
def list_tenants(control: ControlDep) -> list[schemas.Tenant]:
    """By name: every one for an admin of the tenant `default`, else your own."""
    return tenants.everyone(control)


@router.post("/tenants", status_code=201, summary="Make a tenant")
def create_tenant(control: ControlDep, body: schemas.TenantCreate) -> schemas.Tenant:
    """Only for admins of the tenant `default`, as is what follows on tenants."""
    return tenants.create(control, body)


@router.patch("/tenants/{tenant}", summary="Suspend a tenant, or let it go on")
def patch_tenant(
    control: ControlDep, tenant: Annotated[str, Path(max_length=63)], body: schemas.TenantPatch
) -> schemas.Tenant:
    """The tokens of a suspended tenant are refused; its data and running jobs stay."""
    return tenants.update(control, tenant, body)


@router.get("/users", summary="List users")
def list_users(control: ControlDep, tenant: OfTenant = None) -> list[schemas.User]:
    """By tenant and name."""
    return tenants.users(control, tenant)


@router.post("/users", status_code=201, summary="Make a user")
def create_user(control: ControlDep, body: schemas.UserCreate) -> schemas.User:
    return tenants.create_user(control, body)


@router.patch("/users/{user_id}", summary="Change a user's role, or disable the user")
def patch_user(control: ControlDep, user_id: Id, body: schemas.UserPatch) -> schemas.User:
    return tenants.update_user(control, user_id, body)


@router.get("/tokens", summary="List API tokens")
def list_tokens(control: ControlDep, tenant: OfTenant = None) -> list[schemas.Token]:
    """Newest first, the revoked ones too."""
    return tokens.everything(control, tenant)


@router.post("/tokens", status_code=201, summary="Make an API token")
def create_token(control: ControlDep, body: schemas.TokenCreate) -> schemas.TokenMade:
    """The answer holds the token; it is not kept and cannot be shown again."""
    return tokens.create(control, body)


@router.delete("/tokens/{token_id}", summary="Revoke an API token")
def revoke_token(control: ControlDep, token_id: Id) -> schemas.Token:
    """At once; it stays in the list."""
    return tokens.revoke(control, token_id)


@router.get("/audit", summary="Who changed what")
def page(
    control: ControlDep,
    limit: Limit = 100,
    cursor: Cursor = None,
    user: Annotated[str | None, Query(max_length=63)] = None,
    tenant: OfTenant = None,
    outcome: Literal["done", "refused", "failed"] | None = None,
    text: Annotated[str | None, Query(max_length=100, description="looked for in action and ref")] = None,
    since: Annotated[Moment | None, Query(description="with a zone, such as 2026-01-31T12:00:00Z")] = None,
) -> Page[schemas.AuditEntry]:
    """Newest first, of the last 400 days."""
    return audit.page(control, limit, cursor, user=user, tenant=tenant, outcome=outcome, text=text, since=since)
