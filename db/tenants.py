"""Tenants, their users, and the tokens that users show the API."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, String, UniqueConstraint, bindparam, select, update
from sqlalchemy.orm import Mapped, Session, joinedload, mapped_column, relationship

from db import touched
from db.base import Base
from db.scope import Owned

ROLES = ("viewer", "operator", "admin")


class TenantRecord(Base):
    """`suspended`: its users' tokens are refused; nothing of it is lost."""

    __tablename__ = "tenants"

    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    created_at: Mapped[datetime]
    suspended: Mapped[bool] = mapped_column(default=False)


class UserRecord(Owned, Base):
    """`disabled`: the user's tokens are refused."""

    __tablename__ = "users"
    __table_args__ = (
        UniqueConstraint("tenant", "name"),
        CheckConstraint("role IN ({})".format(", ".join(f"'{role}'" for role in ROLES)), name="role"),
    )

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    tenant: Mapped[str] = mapped_column(ForeignKey("tenants.name"))
    name: Mapped[str] = mapped_column(String(63))
    role: Mapped[str] = mapped_column(String(12))
    created_at: Mapped[datetime]
    disabled: Mapped[bool] = mapped_column(default=False)


class TokenRecord(Owned, Base):
    """Only the SHA-256 of a token is kept: it has 256 random bits, so that no slower hash is needed. `hint` is its
    beginning, by which people tell tokens apart. `scopes`: the areas that it may change."""

    __tablename__ = "api_tokens"

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    tenant: Mapped[str] = mapped_column(ForeignKey("tenants.name"), index=True)
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id", ondelete="CASCADE"), index=True)
    name: Mapped[str] = mapped_column(String(120))
    hint: Mapped[str] = mapped_column(String(16))
    sha256: Mapped[str] = mapped_column(String(64), unique=True, info={"secret": True})
    scopes: Mapped[list[Any]]
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]
    user: Mapped[UserRecord] = relationship(lazy="joined")


def find(session: Session, name: str) -> TenantRecord | None:
    return session.scalar(select(TenantRecord).where(TenantRecord.name == name))


def everyone(session: Session) -> list[TenantRecord]:
    return list(session.scalars(select(TenantRecord).order_by(TenantRecord.name)))


def find_user(session: Session, user_id: str) -> UserRecord | None:
    return session.scalar(select(UserRecord).where(UserRecord.id == user_id))


def user_named(session: Session, tenant: str, name: str) -> UserRecord | None:
    return session.scalar(select(UserRecord).where(UserRecord.tenant == tenant, UserRecord.name == name))


def users(session: Session, tenant: str | None) -> list[UserRecord]:
    """Of a tenant or (None) of all that are seen, by tenant and name."""
    query = select(UserRecord).order_by(UserRecord.tenant, UserRecord.name)
    return list(session.scalars(query if tenant is None else query.where(UserRecord.tenant == tenant)))


def find_token(session: Session, token_id: str) -> TokenRecord | None:
    return session.scalar(select(TokenRecord).where(TokenRecord.id == token_id))


_BY_HASH = (
    select(TokenRecord, TenantRecord)
    .join(TenantRecord, TenantRecord.name == TokenRecord.tenant)
    .where(TokenRecord.sha256.in_(bindparam("hashes", expanding=True)))
    .options(joinedload(TokenRecord.user))
)


def tokens_of(session: Session, hashes: Collection[str]) -> dict[str, tuple[TokenRecord, TenantRecord]]:
    """By SHA-256 the tokens with these hashes, as far as there are such, each with its user and its tenant."""
    found = session.execute(_BY_HASH, {"hashes": list(hashes)})
    return {token.sha256: (token, tenant) for token, tenant in found}


def tokens(session: Session, tenant: str | None) -> list[TokenRecord]:
    """Newest first, the revoked ones too."""
    query = select(TokenRecord).order_by(TokenRecord.created_at.desc(), TokenRecord.id)
    return list(session.scalars(query if tenant is None else query.where(TokenRecord.tenant == tenant)))


def touch(session: Session, token_id: str, time: datetime) -> None:
    """Note that a token is in use; it lets in no one more or less for that."""
    query = update(TokenRecord).where(TokenRecord.id == token_id).values(last_used_at=time)
    session.execute(query, execution_options=touched.unnoticed())
