"""Operations: checks of uploads and merges of models, while they go on and for a day after."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query
from fastapi.responses import StreamingResponse

from core.api import schemas
from core.api.depends import ControlDep
from core.control import merging, operations

router = APIRouter(prefix="/operations", tags=["operations"])
OperationId = Annotated[str, Path(max_length=64)]


@router.get("", summary="List operations")
def page(
    control: ControlDep,
    kind: Annotated[Literal["dataset", "merge"] | None, Query()] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> list[schemas.Operation]:
    """Newest first."""
    return operations.page(control, kind, limit)


@router.get("/{operation}", summary="Look at an operation")
def get(control: ControlDep, operation: OperationId) -> schemas.Operation:
    return operations.get(control, operation)


@router.post("/{operation}/cancel", summary="Cancel an operation")
def cancel(control: ControlDep, operation: OperationId) -> schemas.Operation:
    """It ends within a second and leaves nothing behind. One that has ended stays what it is."""
    return operations.cancel(control, operation)


@router.get(
    "/{operation}/download",
    summary="Download a merged model",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}}}},
)
def download(control: ControlDep, operation: OperationId) -> StreamingResponse:
    """A tar of the model's folder, as any program that reads Hugging Face models takes it. Kept for a day."""
    content, size, filename = merging.archive(control, operation)
    headers = {"content-length": str(size), "content-disposition": f'attachment; filename="{filename}"'}
    return StreamingResponse(content, media_type="application/x-tar", headers=headers)
