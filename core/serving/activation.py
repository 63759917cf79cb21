"""How the launcher learns that the runtime is active in SGLang's scheduler, and which requests are the engine's own.

SGLang swallows a plugin's errors, so the runtime leaves word in a file that the launcher looks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from core.link.messages import Hello

CALIBRATION_PREFIX = "harli-calibration-"
CALIBRATION_END = f"{CALIBRATION_PREFIX}end"
_PROFILE_PREFIX = f"{CALIBRATION_PREFIX}profile-"


class Active(msgspec.Struct, frozen=True):
    """What the runtime leaves word of: itself, and the batches, (requests, tokens of each), that it has to decode for
    `profile_steps` steps to take a profile (none: it has one, or cannot)."""

    hello: Hello
    batches: tuple[tuple[int, int], ...] = ()
    profile_steps: int = 0


def profile_rid(batch: int, request: int) -> str:
    """The id of a request that is decoded to be measured."""
    return f"{_PROFILE_PREFIX}{batch}-{request}"


def profile_batch(rids: Sequence[str]) -> int | None:
    """The number of the measured batch that these requests are, None when others are among them."""
    numbers = {rid.removeprefix(_PROFILE_PREFIX).split("-")[0] for rid in rids if rid.startswith(_PROFILE_PREFIX)}
    if len(numbers) != 1 or not all(rid.startswith(_PROFILE_PREFIX) for rid in rids):
        return None
    return int(numbers.pop())


def report(data_dir: Path, active: Active) -> None:
    """Leave word that this runtime is active."""
    path = _file(data_dir, active.hello.engine_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(active))


def take(data_dir: Path, engine_id: str) -> Active | None:
    """The word left for this engine, once; None when its runtime never came to life."""
    path = _file(data_dir, engine_id)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Active)
    except FileNotFoundError:
        return None
    finally:
        path.unlink(missing_ok=True)


def _file(data_dir: Path, engine_id: str) -> Path:
    return data_dir / "run" / f"{engine_id}.json"
