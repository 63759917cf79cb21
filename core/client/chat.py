"""Answers of a model, piece by piece."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httpx

from core.api import schemas
from core.client.sent import ServerSent
from core.client.steps import Request, plain, raise_for, reason
from core.errors import HarliError, Invalid, Unavailable

_SILENCE_S = 300.0


@dataclass(frozen=True)
class ChatReply:
    """A finished answer: its text, why it ended, tokens, ms to the first text and in all."""

    text: str
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    first_ms: float | None
    total_ms: float


class ChatStream:
    """Iterates over the pieces of an answer as they come; `reply` is there once it has ended."""

    def __init__(self, pieces: Iterator[str | ChatReply]) -> None:
        self._pieces = pieces
        self.reply: ChatReply | None = None

    def __iter__(self) -> Iterator[str]:
        for piece in self._pieces:
            if isinstance(piece, ChatReply):
                self.reply = piece
            else:
                yield piece


class AsyncChatStream:
    """The same for ``async for``."""

    def __init__(self, pieces: AsyncIterator[str | ChatReply]) -> None:
        self._pieces = pieces
        self.reply: ChatReply | None = None

    async def __aiter__(self) -> AsyncIterator[str]:
        async for piece in self._pieces:
            if isinstance(piece, ChatReply):
                self.reply = piece
            else:
                yield piece


def chat_request(
    messages: str | Sequence[schemas.Message | dict[str, Any]], model: str | None, sampling: dict[str, Any]
) -> Request:
    """The request for a stream."""
    turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else [plain(m) for m in messages]
    body = {**sampling, "messages": turns, "stream": True, "stream_options": {"include_usage": True}}
    if model is not None:
        body["model"] = model
    return Request("POST", "/v1/chat/completions", json=body, read_timeout_s=_SILENCE_S)


class ChatReader:
    """Reads a chat stream that it is fed line by line."""

    def __init__(self) -> None:
        self.ended = False
        self._start = time.perf_counter()
        self._first_ms: float | None = None
        self._finish_reason: str | None = None
        self._usage: dict[str, Any] = {}
        self._text: list[str] = []
        self._sent = ServerSent()

    def feed(self, line: str) -> list[str]:
        """The pieces of the answer that the line completes. Raises Invalid for an error in the stream."""
        sent = self._sent.feed(line)
        if sent is None:
            return []
        if sent.data == "[DONE]":
            self.ended = True
            return []
        chunk = json.loads(sent.data)
        if "error" in chunk:
            raise _failure(chunk["error"])
        self._usage = chunk.get("usage") or self._usage
        pieces = []
        for choice in chunk.get("choices") or []:
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            piece = (choice.get("delta") or {}).get("content")
            if piece:
                self._first_ms = self._first_ms or (time.perf_counter() - self._start) * 1e3
                pieces.append(piece)
        self._text += pieces
        return pieces

    def reply(self) -> ChatReply:
        return ChatReply(
            text="".join(self._text),
            finish_reason=self._finish_reason,
            prompt_tokens=self._usage.get("prompt_tokens"),
            completion_tokens=self._usage.get("completion_tokens"),
            first_ms=self._first_ms,
            total_ms=(time.perf_counter() - self._start) * 1e3,
        )


def raise_refusal(response: httpx.Response) -> None:
    """Raise what an error response says; what the engine refuses is Invalid."""
    if response.status_code == HTTPStatus.BAD_REQUEST:
        raise _failure(response.json().get("error"))
    raise_for(response)


def broken(base_url: str, error: httpx.HTTPError) -> Unavailable:
    return Unavailable(
        "engine_unreachable", f"the answer from {base_url} broke off: {reason(error)}; try again when it is back"
    )


def _failure(error: Any) -> HarliError:
    """Of an error in OpenAI's shape."""
    known = error if isinstance(error, dict) else {"message": str(error)}
    kind = Unavailable if known.get("type") == "server_error" else Invalid
    return kind(known.get("code") or "engine_refused", str(known.get("message")), known.get("param") or "model")
