"""``python -m core.api``: serve the API at the settings' address until SIGTERM or Ctrl-C.

Open requests get a few seconds to end, then the dispatch lease is given back. An address that is taken or a store that
cannot be opened is said on standard error, with exit status 1.
"""

from __future__ import annotations

import gc
import logging
import signal
import socket
import sys

import uvicorn
from pydantic import ValidationError

from core.api.errors import explain
from core.config import Settings
from core.errors import Conflict, HarliError
from db.store import Store

_GRACE_S = 5
# The event loop lets go of the interpreter's lock whenever it waits, and gets it back from a thread that computes after
# this time at the latest: five times as often as by default, since most of its turns take less than a millisecond.
_SWITCH_S = 0.001


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # What was made until now stays: the collector, which stops every thread, need not look at it again.
        gc.collect()
        gc.freeze()


def main() -> int:
    try:
        settings = Settings()
    except ValidationError as error:
        print(f"harli api: setting {explain(error.errors())[1]}", file=sys.stderr)
        return 1
    try:
        listener = _listen(settings)
        # Opened once before serving: an error then is a sentence, not the trace of a failed start.
        settings.data_dir.expanduser().mkdir(parents=True, exist_ok=True)
        Store(settings.resolved_database_url).close()
    except HarliError as error:
        print(f"harli api: {error.message}", file=sys.stderr)
        return 1
    # Only now: it takes seconds, for which what is wrong with the settings need not wait.
    from core.api.app import create_app

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for chatty in ("alembic", "httpx"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    config = uvicorn.Config(
        create_app(settings),
        log_config=None,
        access_log=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=_GRACE_S,
    )
    # uvicorn raises the signal that ended it once more at the end; an orderly end is no failure.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    server = _Server(config)
    sys.setswitchinterval(_SWITCH_S)
    server.run(sockets=[listener])
    return 0 if server.started else 1


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.api_port))
    except OSError as error:
        listener.close()
        raise Conflict(
            "port_taken",
            f"the API cannot listen on {settings.host}:{settings.api_port} ({error.strerror}); end what uses it, or "
            "set HARLI_API_PORT or HARLI_HOST",
            "api_port",
        ) from error
    return listener


if __name__ == "__main__":
    sys.exit(main())
