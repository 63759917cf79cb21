"""Figures, sizes, spans and times as people read them."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import streamlit as st

_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#+\-.!|>~$:<])")


def plain(text: str) -> str:
    """Text from elsewhere with everything escaped that Streamlit's Markdown would act on."""
    return _MARKDOWN.sub(r"\\\1", text)


def number(value: float | None, digits: int = 0) -> str:
    """A figure with thousands separated; an en dash when there is none."""
    return "–" if value is None else f"{value:,.{digits}f}"


def counted(count: int, noun: str) -> str:
    """``1 remark``, ``2 remarks``."""
    return f"{number(count)} {noun}{'' if count == 1 else 's'}"


def ms(value: float | None) -> str:
    """Milliseconds to three significant digits, without the unit."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percent(share: float | None, digits: int = 0) -> str:
    return "–" if share is None else f"{share * 100:.{digits}f}"


def size(count: int) -> str:
    """Bytes in binary units."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def span(seconds: float) -> str:
    """A duration as its two largest units: ``45 s``, ``3 min 20 s``, ``2 h 5 min``, ``1 d 3 h``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def viewer_zone() -> ZoneInfo:
    """The time zone of the browser; UTC when it is unknown."""
    try:
        return ZoneInfo(st.context.timezone or "UTC")
    except (ZoneInfoNotFoundError, ValueError):
        return ZoneInfo("UTC")


def day(time: datetime) -> str:
    """A date in the viewer's zone."""
    return time.astimezone(viewer_zone()).strftime("%Y-%m-%d")


def when(time: datetime | None) -> str:
    """A point in time in the viewer's zone: the time of day, with the date when it is another day."""
    if time is None:
        return "–"
    zone = viewer_zone()
    local = time.astimezone(zone)
    today = datetime.now(UTC).astimezone(zone).date()
    return local.strftime("%H:%M:%S") if local.date() == today else local.strftime("%Y-%m-%d %H:%M:%S")
