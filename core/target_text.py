"""Targets as people write them on the command line: ``itl=60``, ``acme/itl=40@0.95``, ``itl=40 mon-fri 09:00-17:00
Europe/Berlin``."""

from __future__ import annotations

import re
from typing import Any

from core.api.schemas import WEEKDAYS, TargetBody, TargetWindow

_TARGET = re.compile(r"(?:(?P<tenant>[^/=\s]+)/)?(?P<kind>[a-z]+)=(?P<ms>[0-9.]+)(?:@(?P<quantile>[0-9.]+))?")
_HOURS = re.compile(r"((?:[01][0-9]|2[0-3]):[0-5][0-9])-((?:[01][0-9]|2[0-3]):[0-5][0-9])")
_LIKE_HOURS = re.compile(r"[0-9:.]+(?:-[0-9:.]+)?")
_KINDS = ("itl", "tpot", "ttft")
USAGE = "itl=60, acme/tpot=80@0.95 or 'itl=40 mon-fri 09:00-17:00 Europe/Berlin'"


def parse(text: str) -> dict[str, Any]:
    """The fields of a `TargetBody`. Raises ValueError for what is not ``[TENANT/]KIND=MS[@QUANTILE] [WINDOW[;
    WINDOW]]``, a window being ``[DAYS] [HH:MM-HH:MM] [ZONE]``."""
    head, _, rest = text.strip().partition(" ")
    match = _TARGET.fullmatch(head)
    if match is None:
        raise ValueError(f"{text!r} is no target; write {USAGE}")
    if match["kind"] not in _KINDS:
        raise ValueError(f"{match['kind']!r} in {text!r} is none of {', '.join(_KINDS)}; write {USAGE}")
    fields: dict[str, Any] = {"kind": match["kind"], "ms": float(match["ms"])}
    if match["quantile"]:
        fields["quantile"] = float(match["quantile"])
    if match["tenant"]:
        fields["tenant"] = match["tenant"]
    if rest.strip():
        fields["windows"] = [_window(part) for part in rest.split(";")]
    return fields


def _window(text: str) -> dict[str, Any]:
    window: dict[str, Any] = {}
    for word in text.split():
        if hours := _HOURS.fullmatch(word):
            window["start"], window["end"] = hours.groups()
        elif _LIKE_HOURS.fullmatch(word):
            raise ValueError(f"{word!r} is no time of day; write it as in 09:00-17:00")
        elif days := _days(word.lower()):
            window["days"] = days
        else:
            window["zone"] = word
    return window


def _days(word: str) -> list[str]:
    """``mon-fri,sun`` as the names of days; nothing when it is not days."""
    found: list[str] = []
    for part in word.split(","):
        first, dash, last = part.partition("-")
        if first not in WEEKDAYS or (dash and last not in WEEKDAYS):
            return []
        start, end = WEEKDAYS.index(first), WEEKDAYS.index(last) if dash else WEEKDAYS.index(first)
        span = range(start, end + 1 if end >= start else end + 1 + len(WEEKDAYS))
        found += [WEEKDAYS[day % len(WEEKDAYS)] for day in span]
    return found


def window_text(window: TargetWindow) -> str:
    """A window as `parse` reads it."""
    return f"{','.join(window.days)} {window.start}-{window.end} {window.zone}"


def text(target: TargetBody) -> str:
    """A target as `parse` reads it."""
    whose = f"{target.tenant}/" if target.tenant else ""
    windows = "; ".join(window_text(window) for window in target.windows)
    return f"{whose}{target.kind}={target.ms:g}@{target.quantile:g}" + (f" {windows}" if windows else "")
