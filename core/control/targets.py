"""Latency targets: a versioned list; who changes it says which version was read."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sqlalchemy.orm import Session

from core.api import schemas
from core.control.context import Control
from core.errors import Conflict, Invalid
from db import changes, engines
from db import targets as rows
from db.base import now
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
            "targets": record.targets,
            "updated_at": record.updated_at,
            "origin": record.origin,
            "applied_version": applied,
        }
    )


def put(control: Control, update: schemas.TargetsUpdate) -> schemas.Targets:
    """Set new targets. Raises Conflict, with those in force, when they are no longer the version that was read."""
    seen: set[tuple[str, float]] = set()
    for number, target in enumerate(update.targets):
        if (target.kind, target.quantile) in seen:
            raise Invalid(
                "target_twice",
                f"targets.{number}: {_words(target)} sets the quantile of another one again; keep one of them",
                f"targets.{number}",
            )
        seen.add((target.kind, target.quantile))
    with control.store.write() as session:
        record = rows.current(session)
        version = record.version if record is not None else 0
        if update.version != version:
            current = view(session)
            in_force = ", ".join(map(_words, current.targets)) or "none"
            raise Conflict(
                "targets_moved",
                f"the targets are at version {version} by now, not {update.version}; in force: {in_force}. Look at "
                "them and set yours again",
                "version",
            )
        _add(session, version + 1, update.targets, "set")
        return view(session)


def propose(session: Session, solo_itl_ms: float | None) -> None:
    """Set the default that an engine's solo gap gives, unless someone has set targets."""
    if solo_itl_ms is None or not math.isfinite(solo_itl_ms) or solo_itl_ms <= 0:
        return
    target = schemas.TargetBody(kind="itl", ms=_sensible(SOLO_FACTOR * solo_itl_ms), quantile=0.99)
    record = rows.current(session)
    if record is None:
        _add(session, 1, [target], "measured")
    elif record.origin == "measured" and record.targets != [target.model_dump()]:
        _add(session, record.version + 1, [target], "measured")


def tightest_itl_ms(record: TargetsRecord | None) -> float | None:
    """The lowest ITL target, whatever its quantile; None without one."""
    if record is None:
        return None
    return min((target["ms"] for target in record.targets if target["kind"] == "itl"), default=None)


def _add(session: Session, version: int, targets: Sequence[schemas.TargetBody], origin: str) -> None:
    plain = [target.model_dump() for target in targets]
    session.add(TargetsRecord(version=version, targets=plain, origin=origin, updated_at=now()))
    changes.add(session, "targets", origin, str(version), version=version)


def _words(target: schemas.TargetBody) -> str:
    return f"{target.kind} p{target.quantile * 100:g} ≤ {target.ms:g} ms"


def _sensible(ms: float) -> float:
    """Two significant digits, rounded up: a measured figure claims no more."""
    unit = 10.0 ** (math.floor(math.log10(ms)) - 1)
    return float(f"{math.ceil(ms / unit - 1e-9) * unit:.6g}")
