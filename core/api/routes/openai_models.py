"""/v1/models and what models answer, so that an OpenAI client needs no other address."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response

from core.api import openai_errors, proxy
from core.api.depends import ControlDep
from core.api.openai_schemas import Deleted, Listed, Model
from core.control import openai_models as models

router = APIRouter(prefix="/v1", tags=["OpenAI-compatible"], responses=openai_errors.RESPONSES)
ModelName = Annotated[str, Path(max_length=200)]


def _answers(*required: str) -> dict[str, Any]:
    """What a route that the engine answers says of its body and answer."""
    schema = {"type": "object", "required": [*required], "properties": {"model": {"type": "string"}}}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


_STREAMS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}}}
}


@router.get("/models", summary="List the models that can be asked now")
def page(control: ControlDep) -> Listed[Model]:
    """The served model, and the adapters that are deployed."""
    return models.page(control)


@router.get("/models/{model}", summary="Look at a model")
def get(control: ControlDep, model: ModelName) -> Model:
    return models.get(control, model)


@router.delete("/models/{model}", summary="Delete a fine-tuned model")
def delete(control: ControlDep, model: ModelName) -> Deleted:
    """The adapter, with all of its versions."""
    return models.delete(control, model)


@router.post(
    "/chat/completions",
    summary="Chat with a model",
    response_class=Response,
    responses=_STREAMS,
    openapi_extra=_answers("messages"),
)
async def chat(request: Request, control: ControlDep) -> Response:
    """Answered by the engine, streamed if asked for. `model` is the served model's name (or left out), or that of a
    deployed adapter."""
    return await proxy.forward(request, control, "/v1/chat/completions")


@router.post(
    "/completions",
    summary="Have a text completed",
    response_class=Response,
    responses=_STREAMS,
    openapi_extra=_answers("prompt"),
)
async def completions(request: Request, control: ControlDep) -> Response:
    """As chat, for plain text."""
    return await proxy.forward(request, control, "/v1/completions")
