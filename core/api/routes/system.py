"""The engine, its figures, the parts of Harli, events."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import anyio
from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import BaseModel
from sse_starlette import EventSourceResponse

from core.api import schemas
from core.api.answers import Shared
from core.api.depends import AnswerKey, AnswersDep, ControlDep, Cursor, Limit, PrincipalDep
from core.api.doctor import Examination
from core.control import engines, notices, targets, telemetry
from core.control.context import Control
from core.control.engines import in_words
from core.control.principal import NOBODY
from core.telemetry import prometheus
from db import alerts, jobs
from db import engines as engine_rows
from db import targets as target_rows
from db.base import now

router = APIRouter(tags=["engine"])
metrics_router = APIRouter(tags=["engine"])


class _Live(BaseModel):
    window_s: Annotated[float, Query(gt=0, le=600, description="seconds to sum up")] = 60


class _History(BaseModel):
    seconds: Annotated[float, Query(gt=0, le=14 * 86400, description="how far back")] = 300
    points: Annotated[int, Query(ge=1, le=2000, description="at most so many points")] = 300


# The tables of what of them is not of the clock.
LIVE = Shared(
    _Live,
    lambda control, asked: telemetry.live(control, asked.window_s).model_dump_json().encode(),
    frozenset({"jobs", "engines", "targets", "alerts", "alert_rules", "notices"}),
)
HISTORY = Shared(
    _History, lambda control, asked: telemetry.history_json(control, asked.seconds, asked.points), frozenset()
)


@router.get("/health", summary="Whether this API process serves")
def health(request: Request, control: ControlDep) -> schemas.Health:
    """Asks the store, so that a process that lost it is not taken for a healthy one."""
    with control.store.read() as session:
        engine_rows.current(session)
    return schemas.Health(
        version=version("harli"),
        database=control.store.dialect,
        dispatcher=request.app.state.owner.owns,
        max_upload_bytes=control.settings.max_upload_mib * 2**20,
    )


@router.get("/engine", summary="The engine as it last reported itself")
def engine(control: ControlDep) -> schemas.Engine:
    with control.store.read() as session:
        return engines.view(session)


@router.get("/notices", summary="What the engine had to tell")
def all_notices(
    control: ControlDep,
    code: Annotated[list[str] | None, Query(max_length=20, description="only of these codes")] = None,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> schemas.Page[schemas.Notice]:
    """Newest first, two weeks of them: `guard` and `guard_lifted` (finetuning stood still, and why), `targets` (others
    came into force), fallbacks, refused commands."""
    return notices.page(control, limit, cursor, tuple(code or ()))


@router.get("/live", summary="Engine, targets and the last seconds summed up", response_model=schemas.Live)
async def live(
    control: ControlDep,
    answers: AnswersDep,
    key: AnswerKey,
    asked: Annotated[_Live, Query()],
) -> Response:
    """Percentiles are exact: of the raw gaps of the window, each weighted by the tokens that saw it."""
    return await answers.get(key, lambda: LIVE.make(control, asked), LIVE.tables)


@router.get("/telemetry", summary="The engine's figures over time", response_model=list[schemas.TelemetryPoint])
async def history(
    control: ControlDep,
    answers: AnswersDep,
    key: AnswerKey,
    asked: Annotated[_History, Query()],
) -> Response:
    """Oldest first. Points are a second or more; those of the last hour are of raw values, older ones of values rounded
    to three digits. Two weeks are kept."""
    return await answers.get(key, lambda: HISTORY.make(control, asked), HISTORY.tables)


@router.get("/parts", summary="The supervised processes")
def parts(control: ControlDep) -> list[schemas.Part]:
    """With the memory that each takes. Empty when Harli was not started by `harli up`."""
    return telemetry.weighed(telemetry.parts(control))


@router.get("/settings", summary="The settings of this API process")
def settings(control: ControlDep) -> dict[str, str]:
    """By name as in harli.toml, without what is secret."""
    return in_words(control)


@router.get("/doctor", summary="What the machine has and lacks")
async def doctor(request: Request, control: ControlDep) -> schemas.Doctor:
    """The report of `harli doctor` on the machine of this API process; taken at most once a minute, in seconds."""
    control.principal.require_platform("viewer")
    examination: Examination = request.app.state.examination
    return await examination.report()


@router.get(
    "/events",
    summary="What happens, as server-sent events",
    response_class=EventSourceResponse,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
async def events(
    request: Request, principal: PrincipalDep, last_event_id: Annotated[str | None, Header(max_length=40)] = None
) -> EventSourceResponse:
    """Each event's data is an `Event`; its event name is the topic. With Last-Event-ID (browsers send it when they
    reconnect) what was missed comes first, as far as an hour back. Telemetry comes once a second and has no id."""
    last = int(last_event_id) if last_event_id is not None and last_event_id.isdecimal() else None
    ending = anyio.Event()
    stream = await request.app.state.broadcaster.events(principal.scope, last, ending)
    return EventSourceResponse(stream, ping=15, shutdown_event=ending, shutdown_grace_period=1)


@metrics_router.get(
    "/metrics",
    summary="Figures for Prometheus",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
def metrics(request: Request, principal: PrincipalDep) -> Response:
    """Counters and histograms are of the time that this process has followed the engine. While the API listens on a
    loopback address no token is needed, elsewhere one of a user of the tenant `default`."""
    if principal is not NOBODY:
        principal.require_platform("viewer")
    control: Control = request.app.state.control
    with control.store.read() as session:
        in_force = targets.in_force(target_rows.current(session), now())
        record = engine_rows.current(session)
        counts = jobs.counts(session)
        firing = [alert.severity for alert in alerts.open_ones(session).values() if alert.state == "firing"]
    text = prometheus.render(
        control.totals,
        jobs={state: counts.get(state, 0) for state in jobs.STATES},
        targets=[(target.kind, target.quantile, target.tenant or "", target.ms) for target in in_force],
        alerts={severity: firing.count(severity) for severity in ("info", "warning", "critical")},
        parts=[(part.name, part.state, part.restarts) for part in telemetry.parts(control)],
        engine_ready=record is not None and record.state == "ready",
        dispatcher=request.app.state.owner.owns,
    )
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
