"""Tests of what this machine lacks are left out, and the run's last lines say so; in CI lacking something fails."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
_REMEDY = "run scripts/system-packages.sh"
_LEFT_OUT = pytest.StashKey[Counter[str]]()


def chromium() -> str | None:
    """The browser that drives the console's tests."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


def postgres() -> Path | None:
    """The folder of PostgreSQL's server binaries; Debian keeps them off the PATH."""
    found = shutil.which("postgres")
    if found:
        return Path(found).resolve().parent
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[4]))
    return versions[-1].parent if versions else None


def nginx() -> str | None:
    """The reverse proxy; Debian keeps it off the PATH, and `scripts/system-packages.sh` unpacks it in the checkout."""
    places = [os.environ.get("PATH", os.defpath), "/usr/sbin", str(ROOT / ".cache/nginx/usr/sbin")]
    return shutil.which("nginx", path=os.pathsep.join(places))


def _lacking() -> dict[str, str]:
    lacking = {}
    if shutil.which("nvidia-smi") is None:
        lacking["gpu"] = "no NVIDIA GPU; run `make test-gpu` on a machine with one"
    if chromium() is None:
        lacking["browser"] = f"no Chromium; {_REMEDY}"
    if postgres() is None:
        lacking["postgres"] = f"no PostgreSQL server; {_REMEDY}"
    if nginx() is None:
        lacking["nginx"] = f"no nginx; {_REMEDY}"
    return lacking


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests whose marker names something that is not here."""
    lacking = _lacking()
    left_out = [(item, name) for item in items for name in lacking if item.get_closest_marker(name)]
    if os.environ.get("CI") and (missing := {name for _, name in left_out} - {"gpu"}):
        raise pytest.UsageError("CI must run every test: " + "; ".join(f"{name}: {lacking[name]}" for name in missing))
    config.stash[_LEFT_OUT] = Counter(f"{name} tests: {lacking[name]}" for _, name in left_out)
    dropped = {item for item, _ in left_out}
    if dropped:
        config.hook.pytest_deselected(items=list(dropped))
        items[:] = [item for item in items if item not in dropped]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how many tests were left out and why."""
    for reason, count in config.stash.get(_LEFT_OUT, Counter()).items():
        terminalreporter.write_line(f"NOT RUN: {count} {reason}", red=True, bold=True)
