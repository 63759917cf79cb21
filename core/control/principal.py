"""Who asks: a user of a tenant, with a role and the areas that the token may change.

A role includes those before it. A viewer looks; an operator changes data sets, jobs and adapters; an admin also manages
users and tokens and reads the audit log. All of that within the own tenant: what belongs to another one is not found.
The tenant ``default`` is the platform's own. Its operators set the latency targets, which hold for everyone, and its
admins are the platform's: they see every tenant and make new ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from core.errors import Forbidden
from db.scope import DEFAULT_TENANT, Scope

Role = Literal["viewer", "operator", "admin"]
ROLES: tuple[Role, ...] = ("viewer", "operator", "admin")
# Areas that a token may be allowed to change; a token without any only reads.
SCOPES: dict[Role, tuple[str, ...]] = {
    "viewer": (),
    "operator": ("datasets", "jobs", "adapters", "targets"),
    "admin": ("datasets", "jobs", "adapters", "targets", "admin"),
}


@dataclass(frozen=True)
class Principal:
    """A user, as known from the token of a request. `token_id` is None for what Harli does by itself."""

    user: str
    tenant: str
    role: Role
    scopes: frozenset[str]
    token_id: str | None = None

    @property
    def is_platform(self) -> bool:
        """Of the tenant that runs the platform."""
        return self.tenant == DEFAULT_TENANT

    @property
    def is_platform_admin(self) -> bool:
        """May see and manage every tenant."""
        return self.is_platform and self.role == "admin"

    @property
    def scope(self) -> Scope:
        """What its sessions of the store see."""
        return Scope(self.tenant, everything=self.is_platform_admin)

    def has(self, role: Role) -> bool:
        return ROLES.index(self.role) >= ROLES.index(role)

    def require(self, role: Role, area: str | None = None) -> None:
        """Raise Forbidden unless the role suffices and the token's scopes have the area."""
        if not self.has(role):
            raise Forbidden(
                "role",
                f"{self.user} of tenant {self.tenant} is {self.role}, and this needs the role {role}; ask an admin of "
                "the tenant",
            )
        if area is not None and area not in self.scopes:
            have = ", ".join(sorted(self.scopes)) or "none (it only reads)"
            raise Forbidden(
                "scope", f"the token lacks the scope {area}; it has: {have}. Use a token with it (`harli token create`)"
            )

    def require_platform(self, role: Role) -> None:
        """Raise Forbidden unless it is of the platform's own tenant, in at least this role."""
        if not self.is_platform:
            raise Forbidden(
                "platform_only",
                f"{self.user} is of tenant {self.tenant}; this concerns every tenant, so that only those of the tenant "
                f"{DEFAULT_TENANT} may do it",
            )
        self.require(role)


def itself(tenant: str = DEFAULT_TENANT) -> Principal:
    """Harli, for what it does by itself in a tenant, such as a scheduled job."""
    return Principal("harli", tenant, "operator", frozenset(SCOPES["operator"]))


NOBODY = Principal("nobody", "", "viewer", frozenset())
"""Who shows no token: sees nothing that belongs to a tenant."""
