"""Telemetry in the store: history for charts, coarser aggregates, retention; and the live figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import psutil
from pydantic import TypeAdapter, ValidationError
from sqlalchemy.orm import Session

from core.api import schemas
from core.control import engines, targets
from core.control.context import Control
from core.telemetry.interval import Interval, coarsen, merge, pack, point, unpack
from db import alerts as alert_rows
from db import audit as audit_rows
from db import changes, idempotency, notices
from db import jobs as job_rows
from db import telemetry as rows
from db.base import now

# Seconds of a point, and how long such points are kept.
RESOLUTIONS = {1: timedelta(hours=1), 10: timedelta(days=1), 60: timedelta(days=14)}
KEEP_CHANGES = timedelta(hours=1)
KEEP_NOTICES = timedelta(days=14)
KEEP_ALERTS = timedelta(days=90)
KEEP_KEYS = timedelta(days=1)
KEEP_AUDIT = timedelta(days=400)
_FRESH_S = 3.0
# Covers the coarsest span and the pause between two times of making such points.
_AGAIN = timedelta(seconds=120)
_PARTS = TypeAdapter(list[schemas.Part])
_POINT = schemas.TelemetryPoint.model_fields.keys()
# An interval of the store: a whole TelemetryRecord, or some of its columns.
_Span = Any


# ---- writing ---------------------------------------------------------------------------------------------------------


def put_second(session: Session, second: int, interval: Interval) -> None:
    """Store what ended in a second (its start, Unix seconds)."""
    rows.put(session, 1, [_row(second, interval)])


def roll_up(session: Session, time: datetime) -> None:
    """Make the coarser points that are due at `time` from the 1 s points, however long ago that was done last. Where
    the clock was set back there are points of what comes again, and the new ones take their place."""
    for resolution in (10, 60):
        end = datetime.fromtimestamp(_floor(time.timestamp(), resolution), UTC)
        last = rows.last_time(session, resolution)
        begin = last + timedelta(seconds=resolution) if last is not None else None
        if begin is not None and begin > end:
            begin = end - _AGAIN
        first = rows.first_time(session, 1, begin)
        if first is None:
            continue
        found = rows.between(session, 1, datetime.fromtimestamp(_floor(first.timestamp(), resolution), UTC), end)
        rows.put(
            session,
            resolution,
            [
                _row(start, coarsen(merge([unpack(row.raw) for row in group])))
                for start, group in _grouped(found, resolution)
            ],
        )


def retain(session: Session, time: datetime) -> None:
    """Forget what is older than its time: telemetry, notifications, notices, alerts, idempotency keys, the surplus of
    job logs, the audit log."""
    for resolution, kept in RESOLUTIONS.items():
        rows.drop_before(session, resolution, time - kept)
    changes.drop_before(session, time - KEEP_CHANGES)
    notices.drop_before(session, time - KEEP_NOTICES)
    alert_rows.drop_before(session, time - KEEP_ALERTS)
    idempotency.drop_before(session, time - KEEP_KEYS)
    job_rows.prune_logs(session)
    audit_rows.drop_before(session, time - KEEP_AUDIT)


def _row(start: int, interval: Interval) -> tuple[datetime, dict[str, Any], bytes]:
    time = datetime.fromtimestamp(start, UTC)
    shown = point(interval).model_copy(update={"time": time})
    return time, shown.model_dump(mode="json"), pack(interval)


# ---- reading ---------------------------------------------------------------------------------------------------------


def history_json(control: Control, seconds: float, points: int) -> bytes:
    """The last `seconds` in at most `points` points (`schemas.TelemetryPoint`), oldest first, as JSON; a time without
    reports has none.

    The finest points that are not too many are taken; their newest part, which the coarser ones have yet to cover, is
    made of finer ones.
    """
    end = now()
    start = end - timedelta(seconds=seconds)
    width = max(seconds / points, 1.0)
    level = max(size for size in RESOLUTIONS if size <= width)
    while level != max(RESOLUTIONS) and seconds > RESOLUTIONS[level].total_seconds():
        level = min(size for size in RESOLUTIONS if size > level)
    step = max(math.ceil(width / level), 1) * level
    stored, since = "[]", start
    shared: list[_Span] = []
    with control.store.read() as session:
        for size in sorted((size for size in RESOLUTIONS if size <= level), reverse=True):
            # Where the clock was set back, the span that goes on now has a point of before.
            ended = end - timedelta(seconds=size)
            if size == step:
                # What fills a column alone is shown as it is stored ...
                stored, last = rows.points_json(session, size, since, ended)
            else:
                # ... what shares one is summed up from raw values.
                found = rows.stored(session, size, since, ended)
                shared += found
                last = found[-1].time if found else None
            since = max(start, last + timedelta(seconds=size)) if last is not None else since
    shown = [_whole(figures) for figures in msgspec.json.decode(stored)]
    shown += [_summary(begin, group).model_dump(mode="json") for begin, group in _grouped(shared, step)]
    for figures in shown:
        figures["tenant_attainment"] = _own(control, figures["tenant_attainment"])
    # One more column than asked for can appear where the first and the last are cut by the span's ends.
    return msgspec.json.encode(shown[-points:])


def _whole(stored: dict[str, Any]) -> dict[str, Any]:
    """A point as it is stored; one of an earlier version has what came since by default."""
    if stored.keys() != _POINT:
        return schemas.TelemetryPoint.model_validate(stored).model_dump(mode="json")
    return stored


def _own(control: Control, shares: dict[str, float]) -> dict[str, float]:
    """Of figures by tenant those that the principal may see."""
    seen = control.principal
    if not shares or seen.scope.everything:
        return shares
    return {tenant: share for tenant, share in shares.items() if tenant == seen.tenant}


def _summary(start: int, group: Sequence[_Span]) -> schemas.TelemetryPoint:
    merged = merge([unpack(row.raw) for row in group])
    return point(merged).model_copy(update={"time": datetime.fromtimestamp(start, UTC)})


def live(control: Control, window_s: float) -> schemas.Live:
    """The engine, its targets and the last `window_s` seconds, exact: from memory in the process that follows the
    engine, from the store in any other."""
    with control.store.read() as session:
        window = recent(control, session, window_s)
        latest = control.window.last(2.0) or _stored(session, _FRESH_S)
        return schemas.Live(
            engine=engines.view(session),
            targets=targets.view(session),
            window_s=window_s,
            now=_shown(control, latest),
            window=_shown(control, window),
            jobs=job_rows.counts(session),
            parts=parts(control),
            alerts=[
                schemas.Alert.model_validate(record, from_attributes=True)
                for record in alert_rows.open_ones(session).values()
            ]
            if control.principal.is_platform
            else [],
        )


def _shown(control: Control, interval: Interval | None) -> schemas.TelemetryPoint | None:
    if interval is None:
        return None
    figures = point(interval)
    return figures.model_copy(update={"tenant_attainment": _own(control, figures.tenant_attainment)})


def recent(control: Control, session: Session, seconds: float) -> Interval | None:
    """The last seconds in one: from memory in the process that follows the engine, from the store in any other."""
    return control.window.last(seconds) or _stored(session, seconds)


def paused_reason(session: Session) -> str | None:
    """Why the engine lets finetuning stand still, by its report of the last seconds; None when it does not."""
    time = now()
    found = rows.newest_point(session, 1, time - timedelta(seconds=_FRESH_S), time)
    reason: str | None = found["paused_reason"] if found is not None else None
    return reason


def _stored(session: Session, window_s: float) -> Interval | None:
    time = now()
    found = rows.stored(session, 1, time - timedelta(seconds=window_s), time)
    return merge([unpack(row.raw) for row in found]) if found else None


def parts(control: Control) -> list[schemas.Part]:
    """The supervised processes, as the supervisor wrote them down; none without a supervisor."""
    path: Path = control.data_dir / "run" / "parts.json"
    try:
        return _PARTS.validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return []


def weighed(parts: Sequence[schemas.Part]) -> list[schemas.Part]:
    """With the memory of each part and its children, as far as they run on this machine."""
    return [part.model_copy(update={"memory_bytes": _resident(part.pid)}) for part in parts]


def _resident(pid: int | None) -> int | None:
    if pid is None:
        return None
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        return sum(int(each.memory_info().rss) for each in family)
    except psutil.Error:
        return None


def _grouped(found: Iterable[_Span], width: int) -> list[tuple[int, list[_Span]]]:
    """By spans of `width` seconds: (start, Unix seconds; the rows that begin in it)."""
    groups: dict[int, list[_Span]] = {}
    for row in found:
        groups.setdefault(_floor(row.time.timestamp(), width), []).append(row)
    return sorted(groups.items())


def _floor(time: float, width: int) -> int:
    return int(time // width) * width
