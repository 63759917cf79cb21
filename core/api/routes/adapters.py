"""Adapters."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import FileResponse
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool

from core.api import schemas, upload
from core.api.depends import ControlDep, Cursor, Limit, Name, NewName, NewVersion
from core.control import adapters, aliases, merging

router = APIRouter(prefix="/adapters", tags=["adapters"])
names_router = APIRouter(prefix="/names/adapters", tags=["adapters"])
Alias = Annotated[
    str, Path(pattern=r"^[a-z][a-z0-9-]{0,30}$", description="a letter, then letters, digits and dashes; at most 31")
]
NewNamePath = Annotated[str, Path(pattern=schemas.NAME)]
Version = Annotated[int | None, Query(ge=1, lt=2**31, description="left out: the newest")]


@names_router.get("/{name}", summary="Whether an adapter can get a name")
def check_name(control: ControlDep, name: Name) -> schemas.NameCheck:
    return adapters.check_name(control, name)


@router.get("", summary="List adapters")
def page(control: ControlDep, limit: Limit = 100, cursor: Cursor = None) -> schemas.Page[schemas.Adapter]:
    """By name."""
    return adapters.page(control, limit, cursor)


@router.post("", status_code=201, summary="Upload an adapter", openapi_extra=upload.OPENAPI)
async def create(
    request: Request, control: ControlDep, name: NewName, new_version: NewVersion = False
) -> schemas.Adapter:
    """A zip or tar of a peft folder. It is checked against what the engine can serve; safetensors only. A taken name is
    refused before the body is read."""
    await run_in_threadpool(adapters.require_name, control, name, new_version)
    async with upload.received(request, control) as file:
        return await run_in_threadpool(adapters.upload, control, file.path, name, new_version, file.filename)


@router.get("/{name}", summary="Look at an adapter")
def get(control: ControlDep, name: Name) -> schemas.Adapter:
    return adapters.get(control, name)


@router.post("/{name}/deploy", summary="Serve an adapter")
def deploy(control: ControlDep, name: Name, body: schemas.AdapterDeploy | None = None) -> schemas.Adapter:
    """The engine serves the version (left out: the newest) under the adapter's name; `deployment` tells how it goes. A
    version that is served now answers until then, and finishes the requests that it has."""
    return adapters.deploy(control, name, body.version if body is not None else None)


@router.post("/{name}/undeploy", summary="Serve an adapter no longer")
def undeploy(control: ControlDep, name: Name) -> schemas.Adapter:
    return adapters.undeploy(control, name)


@router.put("/{name}/aliases/{alias}", summary="Promote a version")
def promote(
    control: ControlDep, name: Name, alias: Alias, body: schemas.AdapterDeploy | None = None
) -> schemas.Adapter:
    """The alias stands for the version (left out: the newest), and the engine serves that as ``name@alias``: what it
    served before answers until the other one does, and finishes the requests that it has."""
    return aliases.promote(control, name, alias, body.version if body is not None else None)


@router.post("/{name}/aliases/{alias}/rollback", summary="Roll an alias back")
def roll_back(control: ControlDep, name: Name, alias: Alias) -> schemas.Adapter:
    """The alias stands for the version that it was before the last promotion."""
    return aliases.roll_back(control, name, alias)


@router.delete("/{name}/aliases/{alias}", status_code=204, summary="Delete an alias", response_class=Response)
def delete_alias(control: ControlDep, name: Name, alias: Alias) -> None:
    """The version that it stood for stays."""
    aliases.delete(control, name, alias)


@router.post("/{name}/merge", status_code=201, summary="Merge adapters into one")
def merge(
    control: ControlDep, name: NewNamePath, body: schemas.AdapterMerge, new_version: NewVersion = False
) -> schemas.Adapter:
    """The weighted sum of adapters of the served model as a new adapter: exact, and of the sum of their ranks, which
    the engine's limit bounds."""
    return merging.combine(control, name, body.parts, new_version)


@router.post("/{name}/merged", status_code=202, summary="Merge an adapter into its base model")
def export(control: ControlDep, name: Name, version: Version = None) -> schemas.Operation:
    """Writes the served model with the adapter merged into its weights, in the background: follow the operation, then
    download its file."""
    return merging.export(control, name, version)


@router.get(
    "/{name}/download",
    summary="Download an adapter",
    response_class=FileResponse,
    responses={200: {"content": {"application/zip": {"schema": {"type": "string", "format": "binary"}}}}},
)
def download(control: ControlDep, name: Name, version: Version = None) -> FileResponse:
    """A zip of the peft folder."""
    path, filename = adapters.archive(control, name, version)
    return FileResponse(path, media_type="application/zip", filename=filename, background=BackgroundTask(path.unlink))


@router.delete("/{name}", status_code=204, summary="Delete an adapter", response_class=Response)
def delete(
    control: ControlDep,
    name: Name,
    version: Annotated[int | None, Query(ge=1, lt=2**31, description="left out: all versions")] = None,
) -> None:
    """What the engine serves of it is undeployed. 409 while a job that has not ended needs it."""
    adapters.delete(control, name, version)
