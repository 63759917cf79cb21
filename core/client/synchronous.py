"""The client for threads, notebooks and the command line."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, cast, overload

import httpx

from core.api import schemas
from core.client.calls import Calls
from core.client.chat import ChatReader, ChatReply, ChatStream, broken, chat_request, raise_refusal
from core.client.sent import RETRY_S, Following
from core.client.steps import LIMITS, Request, Steps, raise_for, unreachable
from core.client.token import Bearer
from core.errors import Unavailable

T = TypeVar("T")


class Client(Calls):
    """The API at `base_url`, such as ``http://127.0.0.1:8600``. `token` is shown to it, or what the file of that path
    holds; None: HARLI_TOKEN, else on the API's own machine the local admin's. `timeout_s` bounds each request but
    uploads and streams. Methods return the bodies of `core.api.schemas` and raise the `HarliError` that the API
    answered with. Safe to share between threads; it holds no state but its connections."""

    def __init__(self, base_url: str, *, token: str | Path | None = None, timeout_s: float = 30.0) -> None:
        self.base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._http = httpx.Client(
            base_url=self.base_url,
            auth=Bearer(self.base_url, token),
            timeout=timeout_s,
            limits=LIMITS,
            trust_env=False,
        )

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.base_url!r})"

    def events(self, last_id: int | None = None) -> Iterator[schemas.Event]:
        """What happens from now on (or since event `last_id`), for as long as it is iterated. A broken connection is
        taken up again where it stopped; raises Unavailable when the API stays away for half a minute."""
        following = Following(last_id)
        while True:
            try:
                with self._stream(following.request()) as response:
                    following.connected()
                    for line in response.iter_lines():
                        if (event := following.feed(line)) is not None:
                            yield event
            except (Unavailable, httpx.HTTPError) as error:
                if not following.may_retry():
                    raise self._known(error) from error
            time.sleep(RETRY_S)

    @overload
    def chat(
        self,
        messages: str | Sequence[schemas.Message | dict[str, Any]],
        model: str | None = None,
        *,
        stream: Literal[True] = True,
        **sampling: Any,
    ) -> ChatStream: ...

    @overload
    def chat(
        self,
        messages: str | Sequence[schemas.Message | dict[str, Any]],
        model: str | None = None,
        *,
        stream: Literal[False],
        **sampling: Any,
    ) -> ChatReply: ...

    def chat(
        self,
        messages: str | Sequence[schemas.Message | dict[str, Any]],
        model: str | None = None,
        *,
        stream: bool = True,
        **sampling: Any,
    ) -> ChatStream | ChatReply:
        """Chat with the served model, or with the deployed adapter that `model` names.

        `messages` is the conversation, or one user message as text; `sampling` goes into the request as it is
        (``max_tokens``, ``temperature`` ...). Raises Unavailable when no engine serves, the engine's own refusal as
        Invalid. A stream ends the generation when it is left early.
        """
        pieces = ChatStream(self._chat_pieces(chat_request(messages, model, sampling)))
        if stream:
            return pieces
        for _ in pieces:
            pass
        assert pieces.reply is not None, "a chat stream ends with its reply"
        return pieces.reply

    def _chat_pieces(self, request: Request) -> Iterator[str | ChatReply]:
        reader = ChatReader()
        try:
            with self._http.stream(**request.arguments(self._timeout_s)) as response:
                if response.status_code >= 400:
                    response.read()
                    raise_refusal(response)
                for line in response.iter_lines():
                    yield from reader.feed(line)
                    if reader.ended:
                        break
        except httpx.HTTPError as error:
            raise broken(self.base_url, error) from error
        yield reader.reply()

    # ---- transport ---------------------------------------------------------------------------------------------------

    def run(self, steps: Steps[T]) -> T:
        """Carry the requests of a call and return what it comes to."""
        try:
            request = next(steps)
            while True:
                try:
                    response = self._exchange(request)
                except BaseException as error:
                    request = steps.throw(error)
                else:
                    request = steps.send(response)
        except StopIteration as end:
            return cast(T, end.value)

    def _exchange(self, request: Request) -> httpx.Response:
        if request.after_s:
            time.sleep(request.after_s)
        try:
            response = self._http.send(
                self._http.build_request(**request.arguments(self._timeout_s)), stream=request.into is not None
            )
            if request.into is not None:
                self._read_into(response, request)
        except httpx.HTTPError as error:
            raise unreachable(self.base_url, error) from error
        return response

    @staticmethod
    def _read_into(response: httpx.Response, request: Request) -> None:
        assert request.into is not None
        try:
            if response.status_code >= 400:
                response.read()
            else:
                for chunk in response.iter_bytes():
                    request.into.write(chunk)
        finally:
            response.close()

    @contextmanager
    def _stream(self, request: Request) -> Iterator[httpx.Response]:
        with self._http.stream(**request.arguments(self._timeout_s)) as response:
            if response.status_code >= 400:
                response.read()
            raise_for(response)
            yield response

    def _known(self, error: Unavailable | httpx.HTTPError) -> Unavailable:
        return error if isinstance(error, Unavailable) else unreachable(self.base_url, error)
