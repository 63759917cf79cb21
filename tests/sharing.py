"""How two processes share the tests: a file's are one process's, with what the file has set up; and so are those of all
files that need an engine or a browser, which are thus started once and never compete. They take longest and come first,
the browser's last among them, when the other process is through and the machine is theirs."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.machine import ROOT


@cache
def place(file: str) -> int:
    """0: some test of that file, a path under the repository, has the marker `engine`; 1: `browser`; 2: neither."""
    text = (ROOT / file).read_text()
    return next((at for at, name in enumerate(("engine", "browser")) if f"pytest.mark.{name}" in text), 2)


class ByFile(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file, _, _ = nodeid.partition("::")
        return file if place(file) == 2 else "engine and browser"


@pytest.hookimpl(optionalhook=True)  # unknown where xdist is left out (-p no:xdist)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    return ByFile(config, log)  # type: ignore[arg-type]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place(str(Path(item.path).relative_to(ROOT))))
