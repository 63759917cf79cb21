"""Latency targets: a versioned list; who changes it says which version was read. What of it counts at a moment is
`core.control.schedule`'s to say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy.orm import Session

from core.api import schemas
from core.control import schedule
from core.control.context import Control
from core.errors import Conflict, Invalid
from core.link.messages import SetTargets, Target
from db import adapters, changes, engines, tenants
from db import targets as rows
from db.base import now
from db.scope import sees
from db.targets import TargetsRecord

# The default target: the p99 of the gaps stays under this many times the gap of one request decoding alone.
SOLO_FACTOR = 3.0


def view(session: Session) -> schemas.Targets:
    record = rows.current(session)
    engine = engines.current(session)
    applied = engine.applied_version if engine is not None and engine.state == "ready" else None
    if record is None:
        return schemas.Targets(version=0, targets=[], origin="none", applied_version=applied)
    return schemas.Targets.model_validate(
        {
            "version": record.version,
            "targets": [target for target in record.targets if _seen(session, target.get("tenant"))],
            "in_force": [target for target in in_force(record, now()) if _seen(session, target.tenant)],
            "updated_at": record.updated_at,
            "origin": record.origin,
            "applied_version": applied,
        }
    )


def _seen(session: Session, tenant: str | None) -> bool:
    """Targets of everyone are everyone's to see, those of a tenant that tenant's."""
    return tenant is None or sees(session, tenant)


def in_force(record: TargetsRecord | None, at: datetime) -> list[schemas.TargetInForce]:
    """What counts at that moment of the targets that were set."""
    if record is None:
        return []
    return schedule.in_force([schemas.TargetBody.model_validate(target) for target in record.targets], at)


def put(control: Control, update: schemas.TargetsUpdate) -> schemas.Targets:
    """Set new targets. Raises Conflict, with those in force, when they are no longer the version that was read."""
    _check(update.targets)
    with control.store.write() as session:
        _check_tenants(session, update.targets)
        record = rows.current(session)
        version = record.version if record is not None else 0
        if update.version != version:
            current = view(session)
            in_force = ", ".join(map(words, current.targets)) or "none"
            raise Conflict(
                "targets_moved",
                f"the targets are at version {version} by now, not {update.version}; in force: {in_force}. Look at "
                "them and set yours again",
                "version",
            )
        _add(session, version + 1, update.targets, "set")
        return view(session)


def _check(targets: Sequence[schemas.TargetBody]) -> None:
    """Raise Invalid for a zone that does not exist, and for a target that says again what another one does."""
    seen: set[tuple[object, ...]] = set()
    for number, target in enumerate(targets):
        for at, window in enumerate(target.windows):
            schedule.check_zone(window.zone, f"targets.{number}.windows.{at}.zone")
        key = (target.tenant, target.kind, target.quantile, *(window.model_dump_json() for window in target.windows))
        if key in seen:
            raise Invalid(
                "target_twice",
                f"targets.{number}: {words(target)} sets the quantile of another one again, for the same tenant and "
                "times; keep one of them",
                f"targets.{number}",
            )
        seen.add(key)


def _check_tenants(session: Session, targets: Sequence[schemas.TargetBody]) -> None:
    """Raise Invalid for a target of a tenant that does not exist: nobody would be held to it."""
    for number, target in enumerate(targets):
        if target.tenant is not None and tenants.find(session, target.tenant) is None:
            raise Invalid(
                "tenant_not_found",
                f"targets.{number}: there is no tenant {target.tenant}; `harli tenants` lists them",
                f"targets.{number}.tenant",
            )


def propose(session: Session, solo_itl_ms: float | None) -> None:
    """Set the default that an engine's solo gap gives, unless someone has set targets."""
    if solo_itl_ms is None or not math.isfinite(solo_itl_ms) or solo_itl_ms <= 0:
        return
    target = schemas.TargetBody(kind="itl", ms=_sensible(SOLO_FACTOR * solo_itl_ms), quantile=0.99)
    record = rows.current(session)
    if record is None:
        _add(session, 1, [target], "measured")
    elif record.origin == "measured" and [(t["kind"], t["ms"]) for t in record.targets] != [(target.kind, target.ms)]:
        _add(session, record.version + 1, [target], "measured")


@dataclass(frozen=True)
class Order:
    """What the engine is to be sent, and what that is made of."""

    message: SetTargets
    in_force: list[schemas.TargetInForce]


def order(session: Session, at: datetime) -> Order | None:
    """What the engine has to obey at that moment; None as long as no targets were ever set."""
    record = rows.current(session)
    if record is None:
        return None
    found = in_force(record, at)
    own = {target.tenant for target in found} - {None}
    served = adapters.everything(session) if own else []
    owners = {adapter.name: adapter.tenant for adapter in served if adapter.tenant in own}
    limits = tuple(Target(kind=one.kind, ms=one.ms, quantile=one.quantile, tenant=one.tenant) for one in found)
    return Order(SetTargets(version=record.version, targets=limits, tenants=owners), found)


def told(order: Order) -> str:
    """``in force now: ITL p99 ≤ 40 ms (Mon–Fri 09:00–17:00 UTC)``; those of tenants are counted only, since everyone
    may read it."""
    general = [target for target in order.in_force if target.tenant is None]
    listed = ", ".join(f"{words(target)} ({target.reason})" for target in general) or "no target of everyone"
    own = len(order.in_force) - len(general)
    return f"in force now: {listed}" + (f", and {own} of tenants" if own else "")


def tightest_itl_ms(targets: Sequence[schemas.TargetInForce]) -> dict[str | None, float]:
    """By tenant (None: of everyone else) the lowest ITL target in force, whatever its quantile."""
    tightest: dict[str | None, float] = {}
    for target in targets:
        if target.kind == "itl":
            tightest[target.tenant] = min(target.ms, tightest.get(target.tenant, math.inf))
    return tightest


def _add(session: Session, version: int, targets: Sequence[schemas.TargetBody], origin: str) -> None:
    plain = [target.model_dump() for target in targets]
    session.add(TargetsRecord(version=version, targets=plain, origin=origin, updated_at=now()))
    changes.add(session, "targets", origin, str(version), version=version)


def words(target: schemas.TargetBody | schemas.TargetInForce) -> str:
    """``ITL p99 ≤ 45 ms``, with the tenant when it is one's."""
    whose = f" for {target.tenant}" if target.tenant else ""
    return f"{target.kind.upper()} p{target.quantile * 100:g} ≤ {target.ms:g} ms{whose}"


def _sensible(ms: float) -> float:
    """Two significant digits, rounded up: a measured figure claims no more."""
    unit = 10.0 ** (math.floor(math.log10(ms)) - 1)
    return float(f"{math.ceil(ms / unit - 1e-9) * unit:.6g}")
