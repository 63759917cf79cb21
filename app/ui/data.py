"""The console's one way to the API: a client per viewer, and reads that all of a viewer's tabs share for a second."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import streamlit as st

from app.ui.background import Answer, Background
from app.ui.paging import every
from core.api.schemas import (
    Adapter,
    Dataset,
    Doctor,
    Engine,
    Frontier,
    JobLogLine,
    JobMetric,
    Live,
    Notice,
    Part,
    TelemetryPoint,
)
from core.client import Client
from core.config import LOOPBACK, Settings
from core.errors import HarliError

REFRESH_S = 1.0
"""Seconds between two refreshes of a live figure."""
_PAGE = 500
_TOKEN = "_token"


@st.cache_resource(show_spinner=False)
def settings() -> Settings:
    """The settings that the console was started with."""
    return Settings()


def is_local() -> bool:
    """Whether only browsers of this machine reach the console: their viewers are the local admin."""
    return st.get_option("server.address") in LOOPBACK


def signed_in_with() -> str | None:
    """The token that this session's viewer gave; None for the local admin's, or (reached from elsewhere) for none."""
    token: str | None = st.session_state.get(_TOKEN)
    return token


def sign_in_as(token: str | None) -> None:
    st.session_state[_TOKEN] = token


def client() -> Client:
    """The client for this session's viewer; all sessions with one token share its connections."""
    token = signed_in_with()
    return _client("" if token is None and not is_local() else token)


@st.cache_resource(show_spinner=False, max_entries=64)
def _client(token: str | None) -> Client:
    return Client(settings().api_url, token=token)


def live(window_s: int = 60) -> Live:
    """The present figures over `window_s` seconds. However many tabs are open, the API is asked once per refresh."""
    return _live(signed_in_with(), window_s)


@st.cache_data(ttl=REFRESH_S * 0.9, show_spinner=False, max_entries=64)
def _live(token: str | None, window_s: int) -> Live:
    return client().live(window_s)


def telemetry(seconds: int) -> list[TelemetryPoint]:
    """The points of the last `seconds`, oldest first."""
    return _telemetry(signed_in_with(), seconds)


@st.cache_data(ttl=REFRESH_S * 0.9, show_spinner=False, max_entries=64)
def _telemetry(token: str | None, seconds: int) -> list[TelemetryPoint]:
    return client().telemetry(seconds)


@st.cache_resource(show_spinner=False, max_entries=64)
def _frontiers(token: str | None) -> Background[Frontier]:
    return Background(fresh_s=4.0)


@st.cache_resource(show_spinner=False, max_entries=64)
def _examinations(token: str | None) -> Background[Doctor]:
    return Background(fresh_s=60.0)


def frontier() -> Answer[Frontier]:
    """The frontier at the present load as it was asked for last, by whichever tab; it is asked for anew when that was
    some seconds ago."""
    return look_at_frontier()()


def look_at_frontier() -> Callable[[], Answer[Frontier]]:
    """`frontier` of this viewer, for a thread that does not know the viewer."""
    return partial(_frontiers(signed_in_with()).look, client().frontier)


def doctor() -> Answer[Doctor]:
    """The report of `harli doctor`, of the last minute."""
    return _examinations(signed_in_with()).look(client().doctor)


def parts() -> list[Part]:
    """The supervised processes with the memory of each."""
    return _parts(signed_in_with())


@st.cache_data(ttl=REFRESH_S * 0.9, show_spinner=False, max_entries=64)
def _parts(token: str | None) -> list[Part]:
    return list(client().parts())


def notices(*codes: str) -> list[Notice]:
    """The last notices of these codes, newest first."""
    return _notices(signed_in_with(), codes)


@st.cache_data(ttl=2 * REFRESH_S, show_spinner=False, max_entries=64)
def _notices(token: str | None, codes: tuple[str, ...]) -> list[Notice]:
    return client().notices(codes, limit=50).items


def job_name(job_id: str) -> str | None:
    """What a job is called; None where the viewer does not find it."""
    return _job_name(signed_in_with(), job_id)


@st.cache_data(ttl=60, show_spinner=False, max_entries=64)
def _job_name(token: str | None, job_id: str) -> str | None:
    try:
        return client().job(job_id).name
    except HarliError:
        return None


def forget() -> None:
    """Drop what was read, so that the next read sees an action's effect."""
    _live.clear()
    _telemetry.clear()


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
