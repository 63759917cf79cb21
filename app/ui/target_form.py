"""The form of one target: whose it is, what it limits, and in which part of the week."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import time
from functools import lru_cache
from typing import Literal
from zoneinfo import available_timezones

import streamlit as st

from app.ui.text import viewer_zone
from core.api.schemas import WEEKDAYS, TargetBody, TargetWindow, Weekday

_EVERYONE = "everyone"
_PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)


def draw(tenants: Sequence[str]) -> TargetBody | None:
    """The target as it stands in the form; None while its ms are missing."""
    left, right = st.columns(2)
    whose = left.selectbox("Of", [_EVERYONE, *tenants], key="new_target_tenant")
    kinds: list[Literal["itl", "tpot", "ttft"]] = ["itl", "tpot", "ttft"]
    kind = right.selectbox("Kind", kinds, format_func=str.upper, key="new_target_kind")
    value = left.number_input("ms", 0.1, 600_000.0, None, 1.0, "%.1f", key="new_target_ms")
    share = right.selectbox(
        "Percentile", _PERCENTILES, _PERCENTILES.index(99.0), format_func=lambda p: f"p{p:g}", key="new_target_share"
    )
    windows = [_window()] if st.toggle("Only in a part of the week", key="new_target_weekly") else []
    if value is None:
        st.caption("Give the ms that it limits.")
        return None
    return TargetBody(
        kind=kind, ms=value, quantile=share / 100, tenant=None if whose == _EVERYONE else whose, windows=windows
    )


@lru_cache(maxsize=1)
def _zones() -> list[str]:
    """All time zones, which are read off the disk."""
    return sorted(available_timezones())


def _window() -> TargetWindow:
    days: list[Weekday] = st.pills(
        "Days", WEEKDAYS, selection_mode="multi", default=list(WEEKDAYS[:5]), format_func=str.title,
        key="new_target_days",
    )  # fmt: skip
    left, right = st.columns(2)
    start = left.time_input("From", time(9), key="new_target_start")
    end = right.time_input("To", time(17), key="new_target_end", help="At or before the start: on the next day")
    zones = _zones()
    own = viewer_zone().key
    zone = st.selectbox("Zone", zones, zones.index(own) if own in zones else zones.index("UTC"), key="new_target_zone")
    return TargetWindow(days=days or list(WEEKDAYS), start=f"{start:%H:%M}", end=f"{end:%H:%M}", zone=zone)
