"""Data sets."""

from __future__ import annotations

import json
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse
from starlette.concurrency import run_in_threadpool

from core.api import schemas, upload
from core.api.depends import ControlDep, Cursor, Limit, Name, NewName, NewVersion
from core.control import datasets
from core.errors import Invalid

router = APIRouter(prefix="/datasets", tags=["data sets"])
names_router = APIRouter(prefix="/names/datasets", tags=["data sets"])
_PARQUET = "application/vnd.apache.parquet"


@names_router.get("/{name}", summary="Whether a data set can get a name")
def check_name(control: ControlDep, name: Name) -> schemas.NameCheck:
    return datasets.check_name(control, name)


@router.get("", summary="List data sets")
def page(control: ControlDep, limit: Limit = 100, cursor: Cursor = None) -> schemas.Page[schemas.Dataset]:
    """Newest first, every version."""
    return datasets.page(control, limit, cursor)


@router.post("", status_code=201, summary="Upload a data set", openapi_extra=upload.OPENAPI)
async def create(
    request: Request,
    control: ControlDep,
    name: NewName,
    columns: Annotated[
        str | None, Query(max_length=10_000, description='JSON object of role → column, such as {"prompt": "question"}')
    ] = None,
    new_version: NewVersion = False,
) -> schemas.Dataset:
    """The file is checked, normalised to Parquet and stored; when any of it cannot be trained on nothing is, and the
    error's `report` says what was found. A taken name is refused before the body is read."""
    mapping = _columns(columns)
    await run_in_threadpool(datasets.require_name, control, name, new_version)
    async with upload.received(request, control) as file:
        return await run_in_threadpool(
            datasets.upload, control, file.path, file.filename, file.sha256, name, mapping, new_version
        )


def _columns(text: str | None) -> dict[str, str] | None:
    if text is None:
        return None
    try:
        mapping = json.loads(text)
    except ValueError:
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
