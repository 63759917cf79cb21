"""The client for programs on an event loop: the methods of `Client`, each awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import httpx

from core.api import schemas
from core.client.calls import Calls
from core.client.chat import AsyncChatStream, ChatReader, ChatReply, broken, chat_request, raise_refusal
from core.client.sent import RETRY_S, Following
from core.client.steps import LIMITS, Request, Steps, raise_for, unreachable
from core.client.token import Bearer
from core.errors import Unavailable

T = TypeVar("T")


class AsyncClient(Calls):
    """As `Client`, for ``async with`` and ``await``. `chat` answers whole; `chat_stream` gives the pieces."""

    def __init__(self, base_url: str, *, token: str | Path | None = None, timeout_s: float = 30.0) -> None:
        self.base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            auth=Bearer(self.base_url, token),
            timeout=timeout_s,
            limits=LIMITS,
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncClient({self.base_url!r})"

    async def events(self, last_id: int | None = None) -> AsyncIterator[schemas.Event]:
        """As `Client.events`, for ``async for``."""
        following = Following(last_id)
        while True:
            try:
                async with self._stream(following.request()) as response:
                    following.connected()
                    async for line in response.aiter_lines():
                        if (event := following.feed(line)) is not None:
                            yield event
            except (Unavailable, httpx.HTTPError) as error:
                if not following.may_retry():
                    raise self._known(error) from error
            await asyncio.sleep(RETRY_S)

    async def chat(
        self, messages: str | Sequence[schemas.Message | dict[str, Any]], model: str | None = None, **sampling: Any
    ) -> ChatReply:
        """The whole answer of the served model, or of the deployed adapter that `model` names; see `Client.chat`."""
        pieces = await self.chat_stream(messages, model, **sampling)
        async for _ in pieces:
            pass
        assert pieces.reply is not None, "a chat stream ends with its reply"
        return pieces.reply

    async def chat_stream(
        self, messages: str | Sequence[schemas.Message | dict[str, Any]], model: str | None = None, **sampling: Any
    ) -> AsyncChatStream:
        """The answer as it comes, for ``async for``."""
        return AsyncChatStream(self._chat_pieces(chat_request(messages, model, sampling)))

    async def _chat_pieces(self, request: Request) -> AsyncIterator[str | ChatReply]:
        reader = ChatReader()
        try:
            async with self._http.stream(**request.arguments(self._timeout_s)) as response:
                if response.status_code >= 400:
                    await response.aread()
                    raise_refusal(response)
                async for line in response.aiter_lines():
                    for piece in reader.feed(line):
                        yield piece
                    if reader.ended:
                        break
        except httpx.HTTPError as error:
            raise broken(self.base_url, error) from error
        yield reader.reply()

    # ---- transport ---------------------------------------------------------------------------------------------------

    async def run(self, steps: Steps[T]) -> T:
        """Carry the requests of a call and return what it comes to."""
        try:
            request = next(steps)
            while True:
                try:
                    response = await self._exchange(request)
                except BaseException as error:
                    request = steps.throw(error)
                else:
                    request = steps.send(response)
        except StopIteration as end:
            return cast(T, end.value)

    async def _exchange(self, request: Request) -> httpx.Response:
        if request.after_s:
            await asyncio.sleep(request.after_s)
        try:
            response = await self._http.send(
                self._http.build_request(**request.arguments(self._timeout_s)), stream=request.into is not None
            )
            if request.into is not None:
                await self._read_into(response, request)
        except httpx.HTTPError as error:
            raise unreachable(self.base_url, error) from error
        return response

    @staticmethod
    async def _read_into(response: httpx.Response, request: Request) -> None:
        assert request.into is not None
        try:
            if response.status_code >= 400:
                await response.aread()
            else:
                async for chunk in response.aiter_bytes():
                    request.into.write(chunk)
        finally:
            await response.aclose()

    @asynccontextmanager
    async def _stream(self, request: Request) -> AsyncIterator[httpx.Response]:
        async with self._http.stream(**request.arguments(self._timeout_s)) as response:
            if response.status_code >= 400:
                await response.aread()
            raise_for(response)
            yield response

    def _known(self, error: Unavailable | httpx.HTTPError) -> Unavailable:
        return error if isinstance(error, Unavailable) else unreachable(self.base_url, error)
