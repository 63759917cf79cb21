"""How fast finetuning goes, as the engine reported it: never guessed, and None until something was measured."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy.orm import Session

from core.api.job_schemas import Speed
from core.control.telemetry import RESOLUTIONS
from db import engines
from db import telemetry as rows
from db.base import now

# The present speed is that of the last minutes in which a job was there; without any, that of the last time.
_PRESENT = timedelta(minutes=10)
_LAST_POINTS = 30
_ENOUGH_S = 3.0
_NO_JOB = ("", "no job")

Point = tuple[datetime, int, dict[str, Any]]


def measured(session: Session) -> Speed | None:
    """Of the present engine, or of earlier ones with the same model and device."""
    since = _same_engine_since(session)
    if since is None:
        return None
    time = now()
    if since > time:  # the clock was set back
        since = time - _PRESENT
    for resolution in RESOLUTIONS:
        start = max(since, time - (_PRESENT if resolution == 1 else RESOLUTIONS[resolution]))
        points = [point for point in rows.points(session, resolution, start, time) if _job_there(point[2])]
        if resolution != 1:
            points = points[-_LAST_POINTS:]
        if (speed := _of(points)) is not None:
            return speed
    return None


def _of(points: Sequence[Point]) -> Speed | None:
    seconds = sum(length for _, length, _ in points)
    tokens = sum(point["finetune_tokens_s"] * length for _, length, point in points)
    if seconds < _ENOUGH_S or tokens <= 0:
        return None
    alone = [(length, point["finetune_tokens_s"]) for _, length, point in points if not point["decode_tokens_s"]]
    alone_s = sum(length for length, _ in alone)
    alone_tokens = sum(length * tokens_s for length, tokens_s in alone)
    time, length, _ = points[-1]
    return Speed(
        tokens_s=tokens / seconds,
        seconds=seconds,
        measured_at=time + timedelta(seconds=length),
        alone_tokens_s=alone_tokens / alone_s if alone_s >= _ENOUGH_S and alone_tokens > 0 else None,
    )


def _job_there(point: dict[str, Any]) -> bool:
    """Whether there was something to train: a second in which nothing of it fitted counts too."""
    return point["finetune_tokens_s"] > 0 or point["plan_reason"] not in _NO_JOB


def _same_engine_since(session: Session) -> datetime | None:
    """Since when engines with the present one's model and device have followed each other."""
    since: datetime | None = None
    kind: tuple[str, str] | None = None
    for record in engines.newest_first(session):
        this = (record.hello["model"], record.hello["device_name"])
        if kind is not None and this != kind:
            break
        kind, since = this, record.since
    return since
