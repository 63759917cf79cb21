"""The token that a client shows the API, and no one else."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import httpx

from core.config import LOOPBACK, Settings


class Bearer(httpx.Auth):
    """Shows the API at `base_url` a token: the one given, or the one in the file given, or (None) what the settings
    name: HARLI_TOKEN, else the local admin's token in the data directory, which is shown only to the API that the
    settings name. A file is read for each request, since the API may have written it only now.
    Requests to others, such as the engine, go without."""

    def __init__(self, base_url: str, token: str | Path | None) -> None:
        self._origin = _origin(httpx.URL(base_url))
        if token is None:
            settings = Settings()
            if settings.token is not None:
                token = settings.token.get_secret_value()
            elif _is_ours(self._origin, _origin(httpx.URL(settings.api_url))):
                token = settings.token_file
        self._token = token

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        token = self._read()
        if token and _origin(request.url) == self._origin:
            request.headers["Authorization"] = f"Bearer {token}"
        yield request

    def _read(self) -> str | None:
        if not isinstance(self._token, Path):
            return self._token
        try:
            return self._token.read_text("ascii").strip() or None
        except OSError:
            return None


def _is_ours(asked: tuple[str, str, int | None], ours: tuple[str, str, int | None]) -> bool:
    """Whether two origins are one API; a loopback address has several names."""
    return asked == ours or ({asked[1], ours[1]} <= LOOPBACK and asked[::2] == ours[::2])


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port
