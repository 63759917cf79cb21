"""Finding the running Harli."""

from __future__ import annotations

from core.client.synchronous import Client
from core.config import Settings
from core.errors import HarliError


def connect(url: str | None = None) -> Client:
    """A client of the running Harli: of `url`, or of the address that the settings name.

    Raises Unavailable, with what to do, when no API answers there.
    """
    client = Client(url or Settings().api_url)
    try:
        client.health()
    except HarliError:
        client.close()
        raise
    return client
