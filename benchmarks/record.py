"""Where and with what a figure was measured, and the file that keeps it."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def provenance(*packages: str) -> dict[str, Any]:
    """Machine, versions of `packages`, date and the command that runs now, without the machine's own folders."""
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": versions,
        "date": datetime.now(UTC).date().isoformat(),
        "command": command(Path(sys.argv[0]).stem, sys.argv[1:]),
    }


def command(program: str, arguments: Sequence[str]) -> str:
    """The command line of a program in this folder; an absolute path is told by its file's name, a folder as DIR."""
    shown = [(Path(one).name if Path(one).suffix else "DIR") if Path(one).is_absolute() else one for one in arguments]
    return " ".join(["python", "-m", f"{__name__.split('.', maxsplit=1)[0]}.{program}", *shown])


def write(name: str, body: dict[str, Any]) -> Path:
    """Write ``results/<name>.json``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(body, indent=2) + "\n")
    return path
