"""/v1/files: OpenAI's files are data sets here."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse

from core.api import openai_errors, upload
from core.api.connected import while_connected
from core.api.depends import ControlDep, Name
from core.api.openai_schemas import Deleted, File, Listed
from core.control import openai_files as files
from core.control.operations import Work
from core.errors import Invalid

router = APIRouter(prefix="/v1/files", tags=["OpenAI-compatible"], responses=openai_errors.RESPONSES)


@router.get("", summary="List files")
def page(
    control: ControlDep,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 100,
    after: Annotated[str | None, Query(max_length=120, description="id of the last file of the page before")] = None,
    order: Literal["asc", "desc"] = "desc",
    purpose: Annotated[str | None, Query(max_length=40)] = None,
) -> Listed[File]:
    """Data sets, every version, by the time of their upload."""
    return files.page(control, limit, after, order == "asc", purpose)


@router.post("", summary="Upload a file", openapi_extra=upload.form("purpose"))
async def create(request: Request, control: ControlDep) -> File:
    """Checked and stored as a data set of the file's name; a file of that name that is there already gets a new
    version. JSONL of chats as OpenAI has them, and whatever else data sets can be made of. A caller who hangs up
    ends the check."""
    async with upload.received(request, control) as file:
        unknown = sorted(file.fields.keys() - {"purpose"})
        if unknown:
            raise Invalid("field", f"{unknown[0]} is not a field of an upload here; leave it out", unknown[0])
        work = Work(control, None, f"the check of {file.filename}")
        purpose, path = file.fields.get("purpose"), file.kept()

        def store() -> File:
            try:
                return files.create(control, path, file.filename, file.sha256, purpose, work)
            finally:
                path.unlink(missing_ok=True)

        made = await while_connected(request, work, store)
        assert made is not None, "it is waited for"
        return made


@router.get("/{file_id}", summary="Look at a file")
def get(control: ControlDep, file_id: Name) -> File:
    return files.get(control, file_id)


@router.get(
    "/{file_id}/content",
    summary="Download a file",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/jsonl": {"schema": {"type": "string", "format": "binary"}}}}},
)
def content(control: ControlDep, file_id: Name) -> StreamingResponse:
    """A data set as chats in JSON lines; of a job's result file its figures per step as CSV."""
    chunks, media_type, filename = files.content(control, file_id)
    disposition = f'attachment; filename="{filename}"'
    return StreamingResponse(chunks, media_type=media_type, headers={"content-disposition": disposition})


@router.delete("/{file_id}", summary="Delete a file")
def delete(control: ControlDep, file_id: Name) -> Deleted:
    """Refused while a job that has not ended reads it."""
    return files.delete(control, file_id)
