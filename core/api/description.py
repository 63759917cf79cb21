"""The API's description of itself (OpenAPI)."""

from __future__ import annotations

import threading

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse


class Described(FastAPI):
    """An application whose description is built once, at the first request for it, in a thread: it takes seconds, and
    others are answered meanwhile."""

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
