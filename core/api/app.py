"""The API's application: routes, errors, and the life of what stands behind them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from importlib.metadata import version

from fastapi import APIRouter, FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.middleware.cors import CORSMiddleware

from core.api import errors, security, upload
from core.api.events import Broadcaster
from core.api.routes import adapters, datasets, jobs, system, targets
from core.config import Settings
from core.control.context import open_control
from core.control.owner import Owner

_DESCRIPTION = """Serve a model and finetune LoRA adapters on the same engine, within its latency targets.

Chat with the model at the engine's own OpenAI-compatible address (`/api/engine`, `http_url`). An error is answered as
`{"error": {"code", "message", "param"}}`."""


def create_app(settings: Settings) -> FastAPI:
    """The application over the settings' store. Opening it migrates the store and makes this process a candidate for
    dispatching; closing it lets go of both. Raises HarliError at start when the store cannot be opened."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        control = await run_in_threadpool(open_control, settings)
        owner, broadcaster = Owner(control), Broadcaster(control)
        app.state.control, app.state.owner, app.state.broadcaster = control, owner, broadcaster
        broadcaster.start()
        await run_in_threadpool(owner.start)
        try:
            yield
        finally:
            await broadcaster.stop()
            await run_in_threadpool(owner.stop)
            control.store.close()

    app = FastAPI(
        title="Harli",
        version=version("harli"),
        description=_DESCRIPTION,
        lifespan=lifespan,
        openapi_url="/api/openapi.json",
        docs_url="/api/docs",
        redoc_url=None,
        responses=errors.RESPONSES,
        separate_input_output_schemas=False,
    )
    errors.install(app)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=security.origins(settings),
        allow_methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
        allow_headers=["Content-Type", "Idempotency-Key", "Last-Event-ID"],
    )
    app.add_middleware(security.SameMachine, settings=settings)
    app.add_middleware(upload.CloseUnread)
    api = APIRouter(prefix="/api")
    for module in (system, datasets, jobs, adapters, targets):
        api.include_router(module.router)
    for names in (datasets.names_router, adapters.names_router):
        api.include_router(names)
    app.include_router(api)
    app.include_router(system.metrics_router)
    return app
