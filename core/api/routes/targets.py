"""Latency targets."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool

from core.api import schemas
from core.api.depends import ControlDep
from core.api.simulator import Simulator
from core.control import frontier, targets

router = APIRouter(prefix="/targets", tags=["targets"])
frontier_router = APIRouter(prefix="/frontier", tags=["targets"])


@router.get("", summary="The targets in force")
def get(control: ControlDep) -> schemas.Targets:
    """`applied_version` is the version that the engine plans with."""
    with control.store.read() as session:
        return targets.view(session)


@router.put("", summary="Set the targets")
def put(control: ControlDep, update: schemas.TargetsUpdate) -> schemas.Targets:
    """In force in the engine within two seconds. 409, with the targets in force, when they are no longer the version
    that was read."""
    return targets.put(control, update)


@frontier_router.get("", summary="What each target would give finetuning")
async def get_frontier(request: Request, control: ControlDep) -> schemas.Frontier:
    """At the load of the last seconds; simulated beside the API, and answered from memory as long as the load stays as
    it is. The first answer takes seconds."""
    simulator: Simulator = request.app.state.simulator
    asked = await run_in_threadpool(frontier.ask, control)
    if asked.question is None:
        return asked.empty
    return frontier.answer(asked, await simulator.answer(asked.question))
