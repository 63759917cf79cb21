"""Schedules."""

from __future__ import annotations

from fastapi import APIRouter, Response

from core.api.depends import ControlDep, Cursor, Limit, Name
from core.api.job_schemas import Schedule, ScheduleCreate, SchedulePatch
from core.api.schemas import Page
from core.control import schedules

router = APIRouter(prefix="/schedules", tags=["schedules"])


@router.post("", status_code=201, summary="Submit a job by cron")
def create(control: ControlDep, body: ScheduleCreate) -> Schedule:
    """Each run takes the newest version of the data set and, with `continued`, goes on from the adapter that the last
    one made. A run is left out while the job before it has not ended."""
    return schedules.create(control, body)


@router.get("", summary="List schedules")
def page(control: ControlDep, limit: Limit = 100, cursor: Cursor = None) -> Page[Schedule]:
    """Newest first."""
    return schedules.page(control, limit, cursor)


@router.get("/{schedule_id}", summary="Look at a schedule")
def get(control: ControlDep, schedule_id: Name) -> Schedule:
    return schedules.get(control, schedule_id)


@router.patch("/{schedule_id}", summary="Change a schedule, or switch it off and on")
def patch(control: ControlDep, schedule_id: Name, body: SchedulePatch) -> Schedule:
    return schedules.update(control, schedule_id, body)


@router.post("/{schedule_id}/run", summary="Run a schedule now")
def run(control: ControlDep, schedule_id: Name) -> Schedule:
    """`last_message` says which job was made, or why none was."""
    return schedules.run_now(control, schedule_id)


@router.delete("/{schedule_id}", status_code=204, summary="Delete a schedule", response_class=Response)
def delete(control: ControlDep, schedule_id: Name) -> None:
    """Its jobs stay."""
    schedules.delete(control, schedule_id)
