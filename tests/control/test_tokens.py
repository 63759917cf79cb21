"""Whose token it is, is asked of the store about once a second, and at once when something of it has changed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sqlalchemy import update
from sqlalchemy.orm import Session

from core.api.tenant_schemas import TokenCreate, UserCreate, UserPatch
from core.control import tenants, tokens
from core.control.context import Control
from core.control.tokens import Tokens
from core.errors import Unauthorized
from db import changes
from db import tenants as rows
from db.base import now
from db.store import Store
from db.tenants import TokenRecord


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds for which tokens are known: they pass when a test says so, and for nothing else in the process."""
    seconds = [100.0]
    monkeypatch.setattr(tokens, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    return seconds


def admin(control: Control) -> Control:
    """As the local admin sees it."""
    tokens.ensure_local(control)
    return control.of(Tokens(control).principal(control.settings.token_file.read_text().strip()))


def made(control: Control) -> tuple[str, str]:
    """A new user and a token: (the user's id, the token)."""
    user = tenants.create_user(control, UserCreate(name="olga", role="operator"))
    return user.id, tokens.create(control, TokenCreate(name="hers", user=user.id)).token


@pytest.mark.usefixtures("clock")
def test_it_is_remembered_whatever_else_is_written(control: Control) -> None:
    _, token = made(admin(control))
    known = Tokens(control)
    principal = known.principal(token)
    with control.store.write() as session:
        changes.add(session, "jobs", "metric", "job-1", tenant="default")
    assert known.remembered(token) == principal


@pytest.mark.usefixtures("clock")
def test_its_use_is_noted_by_one_of_those_who_use_it_and_does_not_make_it_forgotten(control: Control) -> None:
    _, token = made(admin(control))
    known = Tokens(control)
    principal = known.principal(token)
    assert [known.take_stale(token) for _ in range(3)] == [True, False, False]
    known.note_use(principal)
    assert known.remembered(token) == principal
    fresh = Tokens(control)
    fresh.principal(token)
    assert not fresh.take_stale(token), "that it is in use stands in the store"


def test_it_is_forgotten_when_its_user_is_changed(control: Control) -> None:
    mine = admin(control)
    user, token = made(mine)
    known = Tokens(control)
    known.principal(token)
    tenants.update_user(mine, user, UserPatch(disabled=True))
    assert known.remembered(token) is None
    with pytest.raises(Unauthorized, match="disabled"):
        known.principal(token)


def test_what_is_changed_while_it_is_looked_up_is_not_overlooked(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = admin(control)
    _, token = made(mine)
    known = Tokens(control)
    found = rows.tokens_of

    def slow(*asked: object) -> object:
        answer = found(*asked)  # type: ignore[arg-type]
        for record, _ in answer.values():
            tokens.revoke(mine, record.id)
        return answer

    monkeypatch.setattr(rows, "tokens_of", slow)
    known.principal(token)
    assert known.remembered(token) is None


def revoke_elsewhere(control: Control, token_id: str | None) -> None:
    """As another API process does on the same store."""
    other = Store(control.store.url.render_as_string(hide_password=False))
    with other.write() as session:
        session.execute(update(TokenRecord).where(TokenRecord.id == token_id).values(revoked_at=now()))
    other.close()


def test_another_process_notices_within_about_a_second(control: Control, clock: list[float]) -> None:
    _, token = made(admin(control))
    known = Tokens(control)
    principal = known.principal(token)
    revoke_elsewhere(control, principal.token_id)
    assert known.remembered(token) == principal
    clock[0] += 1.1
    assert known.remembered(token) is None
    with pytest.raises(Unauthorized, match="revoked"):
        known.principal(token)


def test_those_in_use_are_looked_up_together(
    control: Control, monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    mine = admin(control)
    user, first = made(mine)
    second, idle, revoked = (tokens.create(mine, TokenCreate(name=name, user=user)) for name in ("b", "c", "d"))
    known = Tokens(control)
    for token in (first, second.token, idle.token, revoked.token):
        known.principal(token)
    for token in (first, second.token, revoked.token):
        assert known.remembered(token) is not None
    revoke_elsewhere(control, revoked.id)
    clock[0] += 1.1
    asked: list[int] = []
    found = rows.tokens_of

    def counting(session: Session, hashes: list[str]) -> object:
        asked.append(len(hashes))
        return found(session, hashes)

    monkeypatch.setattr(rows, "tokens_of", counting)
    known.principal(first)
    assert [known.remembered(one.token) is not None for one in (second, idle, revoked)] == [True, False, False]
    clock[0] += 1.1
    known.principal(first)
    assert asked == [3, 2], "one that is not taken any more is asked for no longer"
