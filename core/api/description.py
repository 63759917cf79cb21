"""The API's description of itself (OpenAPI)."""

from __future__ import annotations

import threading
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

_SHAPES = "#/components/schemas"


def answered(body: type[BaseModel], text: str | None = None) -> dict[str, Any]:
    """An answer that every route may give, for FastAPI's `responses`; `body` must be among the shapes of `Described`.
    Of its `model` FastAPI would make a validator for every route anew, for seconds, on the event loop."""
    content = {"application/json": {"schema": {"$ref": f"{_SHAPES}/{body.__name__}"}}}
    return {"content": content} if text is None else {"content": content, "description": text}


class Described(FastAPI):
    """An application whose description is built once, at the first request for it, in a thread: it takes a while, and
    others are answered meanwhile. `shapes`: the bodies of what is `answered`; `public`: paths that ask for no token."""

    def __init__(
        self, *, shapes: tuple[type[BaseModel], ...] = (), public: frozenset[str] = frozenset(), **given: Any
    ) -> None:
        self._shapes = shapes
        self._public = public
        super().__init__(**given)

    def openapi(self) -> dict[str, Any]:
        description = super().openapi()
        known = description["components"]["schemas"]
        for body in self._shapes:
            shape = body.model_json_schema(mode="serialization", ref_template=_SHAPES + "/{model}")
            for name, inner in {**shape.pop("$defs", {}), body.__name__: shape}.items():
                known.setdefault(name, inner)
        for path in self._public & description["paths"].keys():
            for operation in description["paths"][path].values():
                operation.pop("security", None)
        return description

    def setup(self) -> None:
        self._lock = threading.Lock()
        self._content: bytes | None = None
        assert self.openapi_url is not None
        # Before FastAPI's own route of this path, which would build it on the event loop.
        self.add_route(self.openapi_url, self._description, include_in_schema=False)
        super().setup()

    def _description(self, _request: Request) -> Response:
        with self._lock:
            if self._content is None:
                self._content = bytes(JSONResponse(self.openapi()).body)
        return Response(self._content, media_type="application/json")
