"""How two processes share the tests: a file's are one process's, with what the file has set up; and so are those of all
files that need an engine, which is thus started once. They take longest and come first, in one process. The other takes
file after file of the rest, the browser's at the end: on two cores they would take the engine's time when it is needed
most, while a job is watched in the browser. Whoever is through takes the next of the files that are left, of the
browser's the longest first, so that both end together."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.machine import ROOT


@cache
def place(file: str) -> int:
    """When the tests of that file, a path under the repository, come: first (0) where one has the marker `engine`, last
    (2) where one has `browser`."""
    text = (ROOT / file).read_text()
    return 0 if "pytest.mark.engine" in text else 2 if "pytest.mark.browser" in text else 1


@cache
def order(file: Path) -> tuple[int, int]:
    """Sorts files: by place; at the last by length, which tells how long their tests take."""
    at = place(str(file.relative_to(ROOT)))
    return at, -file.stat().st_size if at == 2 else 0


class ByFile(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file, _, _ = nodeid.partition("::")
        return "engine" if place(file) == 0 else file


@pytest.hookimpl(optionalhook=True)  # unknown where xdist is left out (-p no:xdist)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    return ByFile(config, log)  # type: ignore[arg-type]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: order(item.path))
