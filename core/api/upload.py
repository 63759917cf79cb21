"""Uploads: one file of a multipart form, streamed to disk and hashed on the way, refused once it is too large."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.control.context import Control, new_id
from core.errors import Invalid, TooLarge

FIELD = "file"


def form(*fields: str) -> dict[str, Any]:
    """What a route says of its body: the file, and text fields that have to be there. FastAPI is told nothing of it,
    because it would read it before the route can look at the name."""
    properties: dict[str, Any] = {FIELD: {"type": "string", "format": "binary"}}
    properties |= {name: {"type": "string"} for name in fields}
    schema = {"type": "object", "required": [FIELD, *fields], "properties": properties}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


OPENAPI = form()
_FLUSH = 1 << 20
# Room for the form's own lines around the file.
_SLACK = 1 << 16
# What is kept of the form's other parts: so many, so long.
_FIELDS = 32
_FIELD_BYTES = 1024
# How much of the rest of a body is still taken after its answer, and for how long its sender may read that.
_LINGER_BYTES = 8 << 20
_LINGER_S = 2.0


@dataclass(frozen=True)
class Upload:
    """A whole file: where it lies for the time of the request, the name it came under, its size and SHA-256. `fields`
    are the form's other parts, as text."""

    path: Path
    filename: str
    bytes: int
    sha256: str
    fields: dict[str, str]

    def kept(self) -> Path:
        """Where the file lies from now on, beyond the request; whoever asks for it takes it away."""
        return self.path.rename(self.path.with_name(new_id("kept")))


@contextlib.asynccontextmanager
async def received(request: Request, control: Control) -> AsyncIterator[Upload]:
    """The request's file, which is gone when the block ends. Raises Invalid or TooLarge; leaves nothing behind."""
    limit = control.settings.max_upload_mib * 2**20
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit + _SLACK:
        raise _too_large(limit)
    path = control.uploads / new_id("upload")
    try:
        with path.open("wb") as file:
            form = _Form(request.headers.get("content-type", ""), file, limit)
            async for chunk in request.stream():
                form.feed(chunk)
                if form.pending >= _FLUSH:
                    await run_in_threadpool(form.flush)
            await run_in_threadpool(form.finish)
        yield Upload(path, form.filename or "upload", form.size, form.sha256.hexdigest(), form.fields())
    finally:
        path.unlink(missing_ok=True)


class _Form:
    """The multipart body as it comes. The part called `file` goes to the disk; of others a short text is kept."""

    def __init__(self, content_type: str, file: BinaryIO, limit: int) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise Invalid(
                "multipart_expected",
                f"the body is {content_type or 'of no type'}; send multipart/form-data with the file in the field "
                f"{FIELD}",
                FIELD,
            )
        self.size = 0
        self.sha256 = hashlib.sha256()
        self.filename: str | None = None
        self.pending = 0
        self._fed = 0
        self._file = file
        self._limit = limit
        self._buffer: list[bytes] = []
        self._header = (bytearray(), bytearray())
        self._inside = self._seen = self._ended = False
        self._field: str | None = None
        self._fields: dict[str, bytearray] = {}
        self._parser = MultipartParser(
            options[b"boundary"],
            {
                "on_part_begin": self._begin,
                "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
                "on_header_end": self._header_end,
                "on_part_data": self._data,
                "on_end": self._end,
            },
        )

    def feed(self, chunk: bytes) -> None:
        if not chunk:
            return
        # What is beside the file is thrown away, but read.
        self._fed += len(chunk)
        if self._fed > self._limit + _SLACK:
            raise _too_large(self._limit)
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise self._broken(str(error)) from error

    def flush(self) -> None:
        """Write and hash what has come; slow enough to be done off the event loop."""
        for data in self._buffer:
            self._file.write(data)
            self.sha256.update(data)
        self._buffer.clear()
        self.pending = 0

    def fields(self) -> dict[str, str]:
        return {name: bytes(value).decode("utf-8", "replace") for name, value in self._fields.items()}

    def finish(self) -> None:
        if not self._ended:
            raise self._broken("it ends in the middle")
        if not self._seen:
            raise Invalid("file_missing", f"the form has no field {FIELD}; send the file in it", FIELD)
        self.flush()

    def _begin(self) -> None:
        self._inside = False
        self._field = None

    def _end(self) -> None:
        self._ended = True

    def _header_end(self) -> None:
        name, value = bytes(self._header[0]).lower(), bytes(self._header[1])
        self._header[0].clear()
        self._header[1].clear()
        if name != b"content-disposition":
            return
        _, options = parse_options_header(value)
        if options.get(b"name") != FIELD.encode():
            if len(self._fields) < _FIELDS:
                self._field = options.get(b"name", b"").decode("utf-8", "replace")[:_FIELD_BYTES]
                self._fields[self._field] = bytearray()
            return
        if self._seen:
            raise Invalid("one_file", f"the form has the field {FIELD} twice; send one file at a time", FIELD)
        self._inside = self._seen = True
        self.filename = Path(options.get(b"filename", b"").decode("utf-8", "replace").replace("\\", "/")).name or None

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._field is not None:
            value = self._fields[self._field]
            value.extend(data[start : min(end, start + _FIELD_BYTES - len(value))])
        if not self._inside:
            return
        self.size += end - start
        self.pending += end - start
        if self.size > self._limit:
            raise _too_large(self._limit)
        self._buffer.append(data[start:end])

    @staticmethod
    def _broken(reason: str) -> Invalid:
        return Invalid("multipart_broken", f"the multipart body cannot be read: {reason}; send it again", FIELD)


class CloseUnread:
    """Middleware: an answer that is given before the request's body has been read closes the connection, so that the
    rest is not sent for nothing (uvicorn would go on reading it, however much it is).

    It is closed once the sender has ended, or after `_LINGER_S`: to one who is still sending then, the system says that
    the connection was reset, and what has been answered is lost with it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        unread = b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"
        if not unread:
            await self._app(scope, receive, send)
            return

        async def reading() -> Message:
            nonlocal unread
            message = await receive()
            unread = unread and bool(message.get("more_body", False))
            return message

        async def sending(message: Message) -> None:
            if unread and message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), (b"connection", b"close")]}
            if unread and message["type"] == "http.response.body" and not message.get("more_body", False):
                await send({**message, "more_body": True})
                if b"expect" not in headers:  # who asks first sends nothing after this answer
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(rest(), _LINGER_S)
                message = {"type": "http.response.body"}
            await send(message)

        async def rest() -> None:
            taken = 0
            while unread and taken < _LINGER_BYTES:
                taken += len((await reading()).get("body", b""))
            if unread:
                await asyncio.sleep(_LINGER_S)

        await self._app(scope, reading, sending)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(
        "upload_too_large",
        f"the upload is larger than {limit} bytes; split the file, or raise HARLI_MAX_UPLOAD_MIB",
        FIELD,
    )
