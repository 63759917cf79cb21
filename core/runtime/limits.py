"""Which latency targets a step obeys: those that apply to a request that runs in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from core.link.messages import Target


class Applied(NamedTuple):
    """A target and the running requests that it applies to."""

    target: Target
    requests: Sequence[str]


class Limits:
    """The targets in force. A request obeys those of its tenant and, for each kind in which its tenant has none, those
    of everyone. Its tenant is that of the adapter which it is served with; one without an adapter has none."""

    def __init__(self, targets: Sequence[Target] = (), tenants: Mapping[str, str] | None = None) -> None:
        """tenants: of each adapter, by its name."""
        self._everyones = tuple(target for target in targets if target.tenant is None)
        self._itl_ms = min((target.ms for target in self._everyones if target.kind == "itl"), default=None)
        self._own = {target.tenant for target in targets} - {None}
        self._tenants = {name: tenant for name, tenant in (tenants or {}).items() if tenant in self._own}
        self._of: dict[str | None, tuple[Target, ...]] = {None: self._everyones}
        for tenant in self._own:
            mine = tuple(target for target in targets if target.tenant == tenant)
            kinds = {target.kind for target in mine}
            self._of[tenant] = mine + tuple(target for target in self._everyones if target.kind not in kinds)

    @property
    def by_tenant(self) -> bool:
        """Whether it matters which adapter a request is served with."""
        return bool(self._tenants)

    def tenants(self, running: Sequence[str], adapters: Sequence[str | None]) -> dict[str, str]:
        """The tenants of those running requests whose tenant has targets of its own. adapters: of each request."""
        if not self._tenants:
            return {}
        tenants = self._tenants
        return {
            rid: tenants[adapter] for rid, adapter in zip(running, adapters, strict=False) if adapter in tenants
        }  # fmt: skip

    def applied(self, running: Sequence[str], adapters: Sequence[str | None]) -> tuple[Applied, ...]:
        """Every target that applies to a running request, with the requests that it applies to."""
        if not self._tenants:
            return tuple([Applied(target, running) for target in self._everyones]) if running else ()
        groups: dict[str | None, list[str]] = {}
        owners = self.tenants(running, adapters)
        for rid in running:
            groups.setdefault(owners.get(rid), []).append(rid)
        merged: dict[Target, list[str]] = {}
        for tenant, rids in groups.items():
            for target in self._of[tenant]:
                merged.setdefault(target, []).extend(rids)
        return tuple([Applied(target, rids) for target, rids in merged.items()])

    def itl_ms(self, running: Sequence[str], adapters: Sequence[str | None]) -> float | None:
        """The tightest ITL target that applies to a running request."""
        if not self._tenants:
            return self._itl_ms if running else None
        return min((one.target.ms for one in self.applied(running, adapters) if one.target.kind == "itl"), default=None)
