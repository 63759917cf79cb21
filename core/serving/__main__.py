"""``python -m core.serving``: the engine in the foreground, with the settings of the environment and harli.toml."""

from __future__ import annotations

import subprocess
import sys

from core.config import Settings
from core.errors import HarliError

_MAKE_FOLDER = (sys.executable, "-m", "core.serving.model_folder")


def main() -> int:
    """Exit status 1 with one line of text when the engine cannot start."""
    from core.serving.launch import serve
    from core.serving.model_folder import ensure, location

    settings = Settings()
    try:
        # Made by a process of its own: what has used torch's threads must not be forked. It tells its errors itself.
        if location(settings) is None and subprocess.run(_MAKE_FOLDER, check=False).returncode:
            return 1
        serve(settings, ensure(settings), say=lambda text: print(text, flush=True))
    except HarliError as error:
        print(f"error: {error.message} [{error.code}]", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
