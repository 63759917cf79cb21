"""The API's application: routes, errors, and the life of what stands behind them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from importlib.metadata import version

from fastapi import APIRouter, Depends, FastAPI
from fastapi.security import HTTPBearer
from starlette.concurrency import run_in_threadpool
from starlette.middleware.cors import CORSMiddleware

from core.api import again, errors, gate, openai_errors, proxy, security, upload
from core.api.answers import Answers
from core.api.connected import Running
from core.api.description import Described
from core.api.doctor import Examination
from core.api.events import Broadcaster
from core.api.openai_schemas import OpenAIErrorBody
from core.api.routes import (
    adapters,
    alerts,
    datasets,
    jobs,
    openai,
    operations,
    quotas,
    schedules,
    system,
    targets,
    tenants,
    webhooks,
)
from core.api.schemas import ErrorBody
from core.api.simulator import Simulator
from core.config import Settings
from core.control.context import open_control
from core.control.owner import Owner
from core.control.tokens import Tokens, ensure_local

_DESCRIPTION = """Serve a model and finetune LoRA adapters on the same engine, within its latency targets.

Under `/v1` OpenAI's clients work as they are: files, fine-tuning jobs, models, chat. An error is answered as
`{"error": {"code", "message", "param"}}`, there with OpenAI's `type` beside."""


# For the description only; `gate` asks for the token.
_BEARER = HTTPBearer(auto_error=False, description="an API token; `harli token create` makes one")


def create_app(settings: Settings) -> FastAPI:
    """The application over the settings' store. Opening it migrates the store and makes this process a candidate for
    dispatching; closing it lets go of both. Raises HarliError at start when the store cannot be opened."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        control = await run_in_threadpool(open_control, settings)
        await run_in_threadpool(ensure_local, control)
        app.state.tokens, app.state.answers = Tokens(control), Answers(control.store)
        owner, broadcaster = Owner(control), Broadcaster(control)
        app.state.control, app.state.owner, app.state.broadcaster = control, owner, broadcaster
        app.state.simulator = simulator = Simulator()
        app.state.examination = Examination()
        app.state.engine_http = proxy.client()
        app.state.running = running = Running()
        broadcaster.start()
        await run_in_threadpool(owner.start)
        try:
            yield
        finally:
            await running.stop()
            await broadcaster.stop()
            await simulator.stop()
            await app.state.engine_http.aclose()
            await run_in_threadpool(owner.stop)
            await run_in_threadpool(app.state.answers.close)
            control.store.close()

    app = Described(
        title="Harli",
        version=version("harli"),
        description=_DESCRIPTION,
        lifespan=lifespan,
        openapi_url="/api/openapi.json",
        docs_url="/api/docs",
        redoc_url=None,
        responses=errors.RESPONSES,
        shapes=(ErrorBody, OpenAIErrorBody),
        public=gate.PUBLIC,
        separate_input_output_schemas=False,
    )
    errors.install(app)
    buckets = gate.Buckets(settings.requests_per_s)
    app.add_middleware(gate.Gate, settings=settings, buckets=buckets)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=security.origins(settings),
        allow_methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
        allow_headers=["Authorization", "Content-Type", "Idempotency-Key", "Last-Event-ID"],
    )
    shared = {"/api/jobs": jobs.PAGE, "/api/live": system.LIVE, "/api/telemetry": system.HISTORY}
    app.add_middleware(again.Again, buckets=buckets, shared=shared)
    app.add_middleware(security.SameMachine, settings=settings)
    app.add_middleware(upload.CloseUnread)
    app.add_middleware(openai_errors.OpenAIErrors)
    api = APIRouter(prefix="/api", dependencies=[Depends(_BEARER)])
    for module in (system, datasets, jobs, schedules, webhooks, adapters, targets, alerts, tenants, quotas):
        api.include_router(module.router)
    for names in (datasets.names_router, datasets.previews_router, adapters.names_router):
        api.include_router(names)
    api.include_router(operations.router)
    api.include_router(tenants.me_router)
    api.include_router(targets.frontier_router)
    app.include_router(api)
    app.include_router(system.metrics_router)
    app.include_router(openai.router, dependencies=[Depends(_BEARER)])
    return app
