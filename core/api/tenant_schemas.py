"""Bodies of the routes about tenants, users, tokens and the audit log."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, Field

from core.api.schemas import NAME, Body

Role = Literal["viewer", "operator", "admin"]
Scope = Literal["datasets", "jobs", "adapters", "targets", "admin"]
USER_NAME = r"^[A-Za-z0-9][A-Za-z0-9._@+-]{0,62}$"


class Me(BaseModel):
    """Whom the token of this request stands for, and what it may change."""

    user: str
    tenant: str
    role: Role
    scopes: list[Scope]
    platform_admin: bool = Field(description="sees and manages every tenant")
    token_id: str | None = None


class Tenant(BaseModel):
    name: str
    created_at: datetime
    suspended: bool = Field(description="its tokens are refused")


class TenantCreate(Body):
    name: str = Field(pattern=NAME)


class TenantPatch(Body):
    suspended: bool


class User(BaseModel):
    id: str
    tenant: str
    name: str
    role: Role
    created_at: datetime
    disabled: bool = Field(description="the user's tokens are refused")


class UserCreate(Body):
    name: str = Field(pattern=USER_NAME, description="unique within the tenant; an address of e-mail will do")
    role: Role = "operator"
    tenant: str | None = Field(None, pattern=NAME, description="None: your own; another one needs an admin of default")


class UserPatch(Body):
    """What is left out stays as it is."""

    role: Role | None = None
    disabled: bool | None = None


class Token(BaseModel):
    """`hint` is how the token begins; the rest of it is not kept."""

    id: str
    tenant: str
    user_id: str
    user: str
    name: str
    hint: str
    scopes: list[Scope]
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    last_used_at: datetime | None = Field(None, description="to the minute")


class TokenCreate(Body):
    name: str = Field(min_length=1, max_length=120, description="what it is for")
    user: str | None = Field(None, max_length=40, description="a user's id; None: yourself")
    scopes: list[Scope] | None = Field(
        None, max_length=5, description="areas that it may change; empty: it only reads; None: all that you both may"
    )
    expires_in_days: float | None = Field(None, gt=0, le=3650, description="None: never")


class TokenMade(Token):
    """The only time that `token` is shown."""

    token: str


class RowChange(BaseModel):
    """What happened to one row of the store: per field its value before and after."""

    table: str
    id: str
    change: Literal["added", "changed", "deleted"]
    fields: dict[str, list[Any]] = {}


class AuditEntry(BaseModel):
    """Who did what, when, from where, and what came of it; `tenant` is that of the user."""

    id: int
    time: datetime
    tenant: str
    user: str
    token_id: str | None = None
    address: str | None = None
    action: str = Field(description="method and route")
    ref: str | None = Field(None, description="what the route names")
    outcome: Literal["done", "refused", "failed"]
    status: int | None = None
    code: str | None = None
    changes: list[RowChange] = []
