"""Data sets."""

from __future__ import annotations

import json
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from starlette.concurrency import run_in_threadpool

from core.api import schemas, upload
from core.api.connected import while_connected
from core.api.depends import ControlDep, Cursor, Limit, Name, NewName, NewVersion
from core.api.description import answered
from core.control import datasets, operations
from core.control.context import new_id
from core.control.operations import Work
from core.errors import Invalid

router = APIRouter(prefix="/datasets", tags=["data sets"])
names_router = APIRouter(prefix="/names/datasets", tags=["data sets"])
previews_router = APIRouter(prefix="/uploads", tags=["data sets"])
Columns = Annotated[
    str | None, Query(max_length=10_000, description='JSON object of role → column, such as {"prompt": "question"}')
]
_PARQUET = "application/vnd.apache.parquet"


@names_router.get("/{name}", summary="Whether a data set can get a name")
def check_name(control: ControlDep, name: Name) -> schemas.NameCheck:
    return datasets.check_name(control, name)


@router.get("", summary="List data sets")
def page(control: ControlDep, limit: Limit = 100, cursor: Cursor = None) -> schemas.Page[schemas.Dataset]:
    """Newest first, every version."""
    return datasets.page(control, limit, cursor)


@router.post(
    "",
    status_code=201,
    summary="Upload a data set",
    openapi_extra=upload.OPENAPI,
    response_model=schemas.Dataset,
    responses={
        200: answered(schemas.Dataset, "A version of the name has these rows already"),
        202: answered(schemas.Operation, "The check goes on; look at its operation"),
    },
)
async def create(
    request: Request,
    response: Response,
    control: ControlDep,
    name: NewName,
    columns: Columns = None,
    new_version: NewVersion = False,
    operation: Annotated[
        str | None,
        Query(pattern=r"^[A-Za-z0-9_-]{8,64}$", description="an id of the caller's making, to watch or cancel it by"),
    ] = None,
    wait_s: Annotated[
        float | None, Query(ge=0, le=3600, description="how long to wait for the check, once the file is here")
    ] = None,
) -> schemas.Dataset | Response:
    """The file is checked, normalised to Parquet and stored; when any of it cannot be trained on nothing is, and the
    error's `report` says what was found. A taken name is refused before the body is read. Rows that a version of the
    name has already make no new one: that version is answered, with the status 200. A caller who hangs up ends it.

    A check that takes longer than `wait_s` goes on by itself: the answer is its operation then, with the status 202,
    and the operation's `result` will be the data set's id."""
    mapping = _columns(columns)
    await run_in_threadpool(datasets.require_name, control, name, new_version)
    if operation is not None:
        await run_in_threadpool(operations.require_new, control, operation)
    elif wait_s is not None:
        operation = new_id("check")
    async with upload.received(request, control) as file:
        work = Work(control, operation, f"the check of {file.filename}")
        await run_in_threadpool(operations.begin, control, "dataset", file.filename, operation)
        path = file.kept()

        def store() -> tuple[schemas.Dataset, bool]:
            with operations.ending(control, work):
                try:
                    made = datasets.store(control, path, file.filename, file.sha256, name, mapping, new_version, work)
                finally:
                    path.unlink(missing_ok=True)  # whoever sees the end finds nothing left
                work.result = made[0].id
                return made

        made = await while_connected(request, work, store, wait_s)
        if made is None:
            assert operation is not None, "only who gives a time to wait is not waited for"
            begun = await run_in_threadpool(operations.get, control, operation)
            return JSONResponse(begun.model_dump(mode="json"), 202, {"Location": f"/api/operations/{operation}"})
        found, is_new = made
        response.status_code = 201 if is_new else 200
        return found


@previews_router.post("/preview", summary="Look at a file before its upload", openapi_extra=upload.OPENAPI)
async def preview(
    request: Request,
    control: ControlDep,
    columns: Columns = None,
    partial: Annotated[bool, Query(description="what is sent is only the beginning of the file")] = False,
) -> schemas.DatasetPreview:
    """How its columns would be read, its first rows, and what an upload would refuse of them; nothing is stored."""
    mapping = _columns(columns)
    async with upload.received(request, control) as file:
        return await run_in_threadpool(datasets.look, control, file.path, file.filename, mapping, partial=partial)


def _columns(text: str | None) -> dict[str, str] | None:
    if text is None:
        return None
    try:
        mapping = json.loads(text)
        json.dumps(mapping, ensure_ascii=False).encode()  # half characters are no names
    except (ValueError, RecursionError):
        mapping = None
    if not isinstance(mapping, dict) or not all(isinstance(column, str) for column in mapping.values()):
        raise Invalid(
            "columns", 'columns must be a JSON object of role → column, such as {"prompt": "question"}', "columns"
        )
    return mapping


@router.get("/{dataset}", summary="Look at a data set")
def get(control: ControlDep, dataset: Name) -> schemas.Dataset:
    """By id, or by name: its newest version."""
    return datasets.get(control, dataset)


@router.get("/{dataset}/rows", summary="Rows of a data set")
def rows(
    control: ControlDep,
    dataset: Name,
    offset: Annotated[int, Query(ge=0, lt=2**63)] = 0,
    limit: Annotated[int, Query(ge=1, le=200)] = 20,
) -> list[schemas.DatasetRow]:
    return datasets.read_rows(control, dataset, offset, limit)


@router.get("/{dataset}/rendered", summary="Rows as the model sees them")
def rendered(
    control: ControlDep,
    dataset: Name,
    offset: Annotated[int, Query(ge=0, lt=2**63)] = 0,
    limit: Annotated[int, Query(ge=1, le=50)] = 10,
) -> list[schemas.RenderedRow]:
    """Written by the served model's chat template, token by token, with the loss mask."""
    return datasets.rendered(control, dataset, offset, limit)


@router.get("/{dataset}/packed", summary="The first micro-batch of a job")
def packed(
    control: ControlDep,
    dataset: Name,
    micro_batch_tokens: Annotated[int | None, Query(ge=32, le=65536)] = None,
    sequence_length: Annotated[int | None, Query(ge=16, le=65536)] = None,
    seed: Annotated[int, Query(ge=0, lt=2**31)] = 0,
) -> schemas.PackedPreview:
    """Exactly as a job with these settings trains on it: tokens, which row each belongs to, which ones the loss
    counts."""
    return datasets.packed(control, dataset, micro_batch_tokens, sequence_length, seed)


@router.get(
    "/{dataset}/download",
    summary="Download the normalised Parquet",
    response_class=FileResponse,
    responses={200: {"content": {_PARQUET: {"schema": {"type": "string", "format": "binary"}}}}},
)
def download(control: ControlDep, dataset: Name) -> FileResponse:
    found = datasets.get(control, dataset)
    return FileResponse(
        datasets.file(control, found.id),
        media_type=_PARQUET,
        filename=f"{found.name}-{found.version}.parquet",
    )


@router.delete("/{dataset}", status_code=204, summary="Delete a data set", response_class=Response)
def delete(control: ControlDep, dataset: Name) -> None:
    """By id: that version; by name: all of them. 409 while a job that has not ended reads it."""
    datasets.delete(control, dataset)
