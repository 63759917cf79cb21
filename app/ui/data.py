"""The console's one way to the API: a shared client, and reads that all open tabs share for a second."""

from __future__ import annotations

from collections import deque

import streamlit as st

from app.ui.paging import every
from core.api.schemas import Adapter, Dataset, Engine, JobLogLine, JobMetric, Live, TelemetryPoint
from core.client import Client
from core.config import Settings

REFRESH_S = 1.0
"""Seconds between two refreshes of a live figure."""
_PAGE = 500


@st.cache_resource(show_spinner=False)
def settings() -> Settings:
    """The settings that the console was started with."""
    return Settings()


@st.cache_resource(show_spinner=False)
def client() -> Client:
    """One client for all sessions; its connections are shared."""
    return Client(settings().api_url)


@st.cache_data(ttl=REFRESH_S * 0.9, show_spinner=False, max_entries=16)
def live(window_s: int = 60) -> Live:
    """The present figures over `window_s` seconds. However many tabs are open, the API is asked once per refresh."""
    return client().live(window_s)


@st.cache_data(ttl=REFRESH_S * 0.9, show_spinner=False, max_entries=16)
def telemetry(seconds: int) -> list[TelemetryPoint]:
    """The points of the last `seconds`, oldest first."""
    return client().telemetry(seconds)


def forget() -> None:
    """Drop what was read, so that the next read sees an action's effect."""
    live.clear()
    telemetry.clear()


def all_datasets() -> list[Dataset]:
    """Every data set, newest first."""
    return every(lambda cursor: client().datasets(_PAGE, cursor))


def all_adapters() -> list[Adapter]:
    """Every adapter, by name."""
    return every(lambda cursor: client().adapters(_PAGE, cursor))


def engine() -> Engine:
    """The engine as the last refresh saw it."""
    return live().engine


def metrics_of(job_id: str) -> list[JobMetric]:
    """The job's metrics in order of steps. What the session has is kept, and only what is new is asked for."""
    known: dict[str, dict[int, JobMetric]] = st.session_state.setdefault("_metrics", {})
    if job_id not in known:
        known.clear()
    steps = known.setdefault(job_id, {})
    # The newest step is read again: its evaluation may have come after its loss.
    for metric in client().job_metrics(job_id, after=max(steps, default=0) - 1):
        steps[metric.step] = metric
    return [steps[step] for step in sorted(steps)]


def log_of(job_id: str, lines: int) -> list[JobLogLine]:
    """The last `lines` of the job's log, oldest first; only what is new is asked for."""
    known: dict[str, deque[JobLogLine]] = st.session_state.setdefault("_logs", {})
    if job_id not in known:
        known.clear()
    kept = known.setdefault(job_id, deque(maxlen=lines))
    kept.extend(client().job_log(job_id, after=kept[-1].id if kept else 0))
    return list(kept)
