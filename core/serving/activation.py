"""How the launcher learns that the runtime is active in SGLang's scheduler, and which requests are calibration.

SGLang swallows a plugin's errors, so the runtime leaves its `Hello` in a file that the launcher looks for.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from core.link.messages import Hello

CALIBRATION_PREFIX = "harli-calibration-"
CALIBRATION_END = f"{CALIBRATION_PREFIX}end"


def report(data_dir: Path, hello: Hello) -> None:
    """Leave word that the runtime of `hello.engine_id` is active."""
    path = _file(data_dir, hello.engine_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(hello))


def take(data_dir: Path, engine_id: str) -> Hello | None:
    """The word left for this engine, once; None when its runtime never came to life."""
    path = _file(data_dir, engine_id)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Hello)
    except FileNotFoundError:
        return None
    finally:
        path.unlink(missing_ok=True)


def _file(data_dir: Path, engine_id: str) -> Path:
    return data_dir / "run" / f"{engine_id}.json"
