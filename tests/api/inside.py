"""A served API with two tenants beside the platform's own, and someone of each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from core.config import Settings
from tests.api.serving import plain, served


@dataclass(frozen=True)
class Inside:
    """`admin` is the platform's, `ann` of tenant a, `bob` of tenant b; both are admins of theirs."""

    settings: Settings
    admin: httpx.Client
    ann: httpx.Client
    bob: httpx.Client

    def someone(self, tenant: str, name: str, role: str, **token: Any) -> httpx.Client:
        """A new user's client."""
        return as_one(self.settings, made(self.admin, tenant, name, role, **token)["token"])


def as_one(settings: Settings, token: str) -> httpx.Client:
    return plain(settings, Authorization=f"Bearer {token}")


def made(admin: httpx.Client, tenant: str, name: str, role: str, **token: Any) -> dict[str, Any]:
    """A user of a tenant, which is made when there is none, and a token; the token's body."""
    if tenant not in [one["name"] for one in admin.get("/api/tenants").json()]:
        assert admin.post("/api/tenants", json={"name": tenant}).status_code == 201
    user = admin.post("/api/users", json={"name": name, "tenant": tenant, "role": role})
    assert user.status_code == 201, user.text
    body = {"name": f"{name}'s", "user": user.json()["id"], **token}
    response = admin.post("/api/tokens", json=body)
    assert response.status_code == 201, response.text
    found: dict[str, Any] = response.json()
    return found


@contextlib.contextmanager
def inside(data_dir: Path, **settings: object) -> Iterator[Inside]:
    with served(data_dir, **settings) as chosen, contextlib.ExitStack() as stack:
        admin = stack.enter_context(plain(chosen))
        tokens = [made(admin, tenant, name, "admin")["token"] for tenant, name in (("a", "ann"), ("b", "bob"))]
        ann, bob = (stack.enter_context(as_one(chosen, token)) for token in tokens)
        yield Inside(chosen, admin, ann, bob)


def operations(http: httpx.Client) -> list[tuple[str, str, dict[str, Any]]]:
    """(method, path template, operation) of everything that the API describes."""
    paths = http.get("/api/openapi.json", timeout=60).json()["paths"]
    return [(method.upper(), path, found) for path, methods in paths.items() for method, found in methods.items()]
