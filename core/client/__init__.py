"""Typed clients of the HTTP API, for notebooks, the console, the command line and other programs.

    from core.client import connect
    harli = connect()

A call is described once, in `calls`; `Client` makes it and `AsyncClient` awaits it.
"""

from __future__ import annotations

from core.client import html
from core.client.asynchronous import AsyncClient
from core.client.calls import TERMINAL, Calls
from core.client.chat import AsyncChatStream, ChatReply, ChatStream
from core.client.connecting import connect
from core.client.progress import job_progress, upload_progress
from core.client.rows import Rows, frame
from core.client.synchronous import Client

__all__ = [
    "TERMINAL", "AsyncChatStream", "AsyncClient", "Calls", "ChatReply", "ChatStream", "Client", "Rows", "connect",
    "frame", "job_progress", "upload_progress",
]  # fmt: skip

html.install()
