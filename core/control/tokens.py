"""API tokens: who shows one, the local admin's, making and revoking them."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import time
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from sqlalchemy.orm import Session

from core.api import tenant_schemas as schemas
from core.control.context import Control, new_id
from core.control.principal import SCOPES, Principal, Role
from core.errors import Forbidden, NotFound, Unauthorized
from db import tenants as rows
from db.base import now
from db.scope import DEFAULT_TENANT
from db.tenants import TenantRecord, TokenRecord, UserRecord

PREFIX = "harli_"
LOCAL_USER = "admin"
# How long a change made by another API process may go unnoticed; one of this process is noticed at once.
_KNOWN_S = 1.0
_MOST_KNOWN = 10_000
# Looked up with one that is asked for.
_MOST_AT_ONCE = 500
_TOUCH_EVERY = timedelta(minutes=1)
_TABLES = frozenset({TenantRecord.__tablename__, UserRecord.__tablename__, TokenRecord.__tablename__})


# ---- who shows one ---------------------------------------------------------------------------------------------------


@dataclass
class _Known:
    """`until`: monotonic seconds; `is_stale`: that it is in use is to be noted; `shown`: since it was looked up."""

    principal: Principal
    until: float
    is_stale: bool
    shown: bool = False


class Tokens:
    """Tells principals from tokens, and remembers them for a moment. Safe to use from any thread."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._known: dict[str, _Known] = {}
        control.store.on_commit(self._forget)

    def remembered(self, token: str) -> Principal | None:
        """The principal, if the store need not be asked."""
        known = self._young(token)
        return known.principal if known is not None else None

    def known(self, token: str) -> Principal | None:
        """The same, if the store need not be told of the token's use either."""
        known = self._young(token)
        return known.principal if known is not None and not known.is_stale else None

    def _young(self, token: str) -> _Known | None:
        known = self._known.get(_digest(token))
        if known is None or known.until <= time.monotonic():
            return None
        known.shown = True
        return known

    def principal(self, token: str) -> Principal:
        """Whose token it is. Raises Unauthorized, with the reason, for one that is not taken.

        The others that are in use are looked up with it, so that many cost the store no more than one."""
        digest = _digest(token)
        # What is read while it is changed goes with what was known before the change.
        known = self._known
        in_use = [other for other, entry in list(known.items()) if entry.shown and other != digest][:_MOST_AT_ONCE]
        for other in in_use:
            if (entry := known.get(other)) is not None:
                entry.shown = False
        began = time.monotonic()
        with self._control.store.read() as session:
            found = rows.tokens_of(session, [digest, *in_use])
        if len(known) >= _MOST_KNOWN:
            known.clear()
        if digest not in found:
            raise Unauthorized("token_unknown", "the token is not known here; ask an admin of your tenant for one")
        for other, (record, tenant) in found.items():
            if _refusal(record, tenant) is None:
                last = record.last_used_at
                is_stale = last is None or last < now() - _TOUCH_EVERY
                known[other] = _Known(_principal(record), began + _KNOWN_S, is_stale)
        if (refusal := _refusal(*found[digest])) is not None:
            raise refusal
        return _principal(found[digest][0])

    def take_stale(self, token: str) -> bool:
        """Whether the use of a token should be noted, which the one who asks first does."""
        found = self._known.get(_digest(token))
        if found is None or not found.is_stale:
            return False
        found.is_stale = False
        return True

    def note_use(self, principal: Principal) -> None:
        """Write down, about once a minute, that a token is in use."""
        if principal.token_id is not None:
            with self._control.store.write() as session:
                rows.touch(session, principal.token_id, now())

    def _forget(self, written: frozenset[str]) -> None:
        if written & _TABLES:
            self._known = {}


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def _principal(record: TokenRecord) -> Principal:
    role: Role = record.user.role  # type: ignore[assignment]
    scopes = frozenset(record.scopes) & frozenset(SCOPES[role])
    return Principal(record.user.name, record.tenant, role, scopes, record.id)


def _refusal(record: TokenRecord, tenant: TenantRecord) -> Unauthorized | None:
    """Why a token is not taken; None for one that is."""
    if record.revoked_at is not None:
        return Unauthorized("token_revoked", f"token {record.hint}… was revoked; use another")
    if record.expires_at is not None and record.expires_at <= now():
        moment = f"{record.expires_at:%Y-%m-%d %H:%M} UTC"
        return Unauthorized("token_expired", f"token {record.hint}… expired at {moment}; use another")
    if record.user.disabled:
        return Unauthorized(
            "user_disabled", f"user {record.user.name} is disabled; ask an admin of tenant {record.tenant}"
        )
    if tenant.suspended:
        return Unauthorized("tenant_suspended", f"tenant {tenant.name} is suspended; ask those who run this platform")
    return None


# ---- the local admin's -----------------------------------------------------------------------------------------------


def ensure_local(control: Control) -> None:
    """See to it that the data directory holds a token of the platform's local admin, which only this system's user can
    read: one that is missing or no longer taken is replaced, and the one before revoked."""
    path = control.settings.token_file
    # All in one write transaction, so that processes that start together agree on one token.
    with control.store.write() as session:
        if not _is_taken(session, path):
            _write_private(path, _make_local(session))


def _is_taken(session: Session, path: Path) -> bool:
    try:
        path.chmod(0o600)
        digest = _digest(path.read_text("ascii").strip())
        found = rows.tokens_of(session, [digest]).get(digest)
    except (FileNotFoundError, UnicodeDecodeError):
        return False
    return found is not None and _refusal(*found) is None


def _make_local(session: Session) -> str:
    name = f"local admin on {socket.gethostname()}"[:120]
    user = rows.user_named(session, DEFAULT_TENANT, LOCAL_USER)
    if user is None:
        user = UserRecord(id=new_id("user"), tenant=DEFAULT_TENANT, name=LOCAL_USER, created_at=now())
        session.add(user)
    user.role, user.disabled = "admin", False
    session.flush()
    for record in rows.tokens(session, DEFAULT_TENANT):
        if record.user_id == user.id and record.name == name and record.revoked_at is None:
            record.revoked_at = now()
    return _add(session, user, name, SCOPES["admin"], None)[0]


def _write_private(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(f"{text}\n")
    partial.replace(path)


# ---- making and revoking ---------------------------------------------------------------------------------------------


def everything(control: Control, tenant: str | None) -> list[schemas.Token]:
    """Newest first, of a tenant or of all that may be seen."""
    with control.store.read() as session:
        return [_view(record) for record in rows.tokens(session, tenant)]


def create(control: Control, body: schemas.TokenCreate) -> schemas.TokenMade:
    """Make a token; its text is in the answer and nowhere else."""
    principal = control.principal
    with control.store.write() as session:
        user = _owner(session, principal, body.user)
        allowed = SCOPES[user.role]  # type: ignore[index]
        scopes = [scope for scope in allowed if scope in principal.scopes] if body.scopes is None else body.scopes
        _require_scopes(principal, user, scopes, allowed)
        expires_at = now() + timedelta(days=body.expires_in_days) if body.expires_in_days is not None else None
        token, record = _add(session, user, body.name, scopes, expires_at)
        session.flush()
        return schemas.TokenMade(**_view(record).model_dump(), token=token)


def _owner(session: Session, principal: Principal, user_id: str | None) -> UserRecord:
    found = (
        rows.find_user(session, user_id)
        if user_id is not None
        else rows.user_named(session, principal.tenant, principal.user)
    )
    if found is None:
        raise NotFound("user_not_found", f"there is no user {user_id}; `harli users` lists those there are", "user")
    return found


def _require_scopes(principal: Principal, user: UserRecord, scopes: Collection[str], allowed: Collection[str]) -> None:
    """A token can do no more than its user, nor more than the token that makes it."""
    if beyond := sorted(set(scopes) - set(allowed)):
        raise Forbidden(
            "scope", f"{user.name} is {user.role} and cannot have the scope {beyond[0]}; leave it out, or change the "
            "user's role", "scopes",
        )  # fmt: skip
    if beyond := sorted(set(scopes) - principal.scopes):
        raise Forbidden("scope", f"your own token lacks the scope {beyond[0]}; leave it out", "scopes")


def _add(
    session: Session, user: UserRecord, name: str, scopes: Collection[str], expires_at: datetime | None
) -> tuple[str, TokenRecord]:
    token = PREFIX + secrets.token_urlsafe(32)
    record = TokenRecord(
        id=new_id("tok"),
        tenant=user.tenant,
        user_id=user.id,
        user=user,
        name=name,
        hint=token[: len(PREFIX) + 6],
        sha256=_digest(token),
        scopes=list(scopes),
        created_at=now(),
        expires_at=expires_at,
    )
    session.add(record)
    return token, record


def revoke(control: Control, token_id: str) -> schemas.Token:
    """Revoke a token; revoking it twice is revoking it once."""
    with control.store.write() as session:
        record = rows.find_token(session, token_id)
        if record is None:
            raise NotFound("token_not_found", f"there is no token {token_id}; see `harli token list`", "token_id")
        if record.revoked_at is None:
            record.revoked_at = now()
        session.flush()
        return _view(record)


def _view(record: TokenRecord) -> schemas.Token:
    shown = {name: getattr(record, name) for name in schemas.Token.model_fields if name != "user"}
    return schemas.Token(**shown, user=record.user.name)
