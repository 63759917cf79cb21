"""Which of the targets that were set are in force at a moment: of everyone and of tenants, always or by the week.

Targets of one tenant, kind and quantile take each other's place: those with an open window go before the one without
windows, and of these the tightest counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, time, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from core.api.schemas import WEEKDAYS, TargetBody, TargetInForce, TargetWindow
from core.errors import Invalid

_Key = tuple[str | None, str, float]


def in_force(targets: Sequence[TargetBody], at: datetime) -> list[TargetInForce]:
    """What counts at that moment, everyone's targets first."""
    groups: dict[_Key, list[TargetBody]] = {}
    for target in targets:
        groups.setdefault((target.tenant, target.kind, target.quantile), []).append(target)
    found = [one for group in groups.values() if (one := _resolved(group, at)) is not None]
    return sorted(found, key=lambda one: (one.tenant is not None, one.tenant or ""))


def _resolved(group: Sequence[TargetBody], at: datetime) -> TargetInForce | None:
    chosen = _chosen(group, at)
    if chosen is None:
        return None
    target, window = chosen
    until = next((moment for moment in sorted(_bounds(group, at)) if _chosen(group, moment) != chosen), None)
    if window is not None:
        reason = describe(window)
    elif any(other.windows for other in group):
        reason = "outside of its windows"
    else:
        reason = "always"
    return TargetInForce(
        kind=target.kind, ms=target.ms, quantile=target.quantile, tenant=target.tenant, reason=reason, until=until
    )


def _chosen(group: Sequence[TargetBody], at: datetime) -> tuple[TargetBody, TargetWindow | None] | None:
    """The target of a group that counts, and the window that makes it count."""
    opened = [(target, window) for target in group for window in target.windows if is_open(window, at)]
    if opened:
        return min(opened, key=lambda pair: pair[0].ms)
    always = [target for target in group if not target.windows]
    return (min(always, key=lambda target: target.ms), None) if always else None


def is_open(window: TargetWindow, at: datetime) -> bool:
    """Whether the window is open at that moment, by the clocks of its zone."""
    local = at.astimezone(ZoneInfo(window.zone))
    start, end, now = time.fromisoformat(window.start), time.fromisoformat(window.end), local.time()
    today, yesterday = WEEKDAYS[local.weekday()], WEEKDAYS[local.weekday() - 1]
    if start < end:
        return today in window.days and start <= now < end
    return (today in window.days and now >= start) or (yesterday in window.days and now < end)


def _bounds(group: Sequence[TargetBody], at: datetime) -> Iterator[datetime]:
    """The moments of the next eight days at which a window of the group may open or close; clocks that are put forward
    or back may do that too."""
    for window in {window.model_dump_json(): window for target in group for window in target.windows}.values():
        zone = ZoneInfo(window.zone)
        first = at.astimezone(zone).date()
        for days in range(9):
            for clock in (window.start, window.end):
                bound = datetime.combine(first + timedelta(days), time.fromisoformat(clock), zone).astimezone(UTC)
                if bound > at:
                    yield bound
        for days in range(9):
            start = at + timedelta(days)
            if start.astimezone(zone).utcoffset() != (start + timedelta(1)).astimezone(zone).utcoffset():
                yield _clock_change(zone, start)


def _clock_change(zone: ZoneInfo, start: datetime) -> datetime:
    """The minute of the day from `start` on at which the zone's clocks are changed."""
    before = start.astimezone(zone).utcoffset()
    start = start.replace(second=0, microsecond=0)
    low, high = 0, 24 * 60 + 1
    while high - low > 1:
        middle = (low + high) // 2
        changed = (start + timedelta(minutes=middle)).astimezone(zone).utcoffset() != before
        low, high = (low, middle) if changed else (middle, high)
    return start + timedelta(minutes=high)


def describe(window: TargetWindow) -> str:
    """``Mon–Fri 09:00–17:00 Europe/Berlin``."""
    hours = "all day" if window.start == window.end else f"{window.start}–{window.end}"
    return f"{_days(window)} {hours} {window.zone}"


def _days(window: TargetWindow) -> str:
    chosen = [index for index, day in enumerate(WEEKDAYS) if day in window.days]
    if len(chosen) == len(WEEKDAYS):
        return "every day"
    runs: list[list[int]] = []
    for index in chosen:
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    names = [WEEKDAYS[run[0]] if len(run) == 1 else f"{WEEKDAYS[run[0]]}–{WEEKDAYS[run[-1]]}" for run in runs]
    return ", ".join(name.title() for name in names)


def check_zone(name: str, param: str) -> None:
    """Raises Invalid, with the field's name, for a zone that this machine does not know."""
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise Invalid(
            "zone", f"{param} is {name!r}; give a name of the time zone database such as Europe/Berlin or UTC", param
        ) from error
