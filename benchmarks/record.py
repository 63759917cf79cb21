"""Where and with what a figure was measured, and the file that keeps it."""

from __future__ import annotations

import json
import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def provenance(*packages: str) -> dict[str, Any]:
    """Machine, versions of `packages`, date and the command that runs now."""
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
        "command": " ".join(["python", "-m", __name__.split(".")[0] + "." + Path(sys.argv[0]).stem, *sys.argv[1:]]),
    }


def write(name: str, body: dict[str, Any]) -> Path:
    """Write ``results/<name>.json``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(body, indent=2) + "\n")
    return path
