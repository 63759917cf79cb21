"""How two processes share the tests: a file's are one process's, with what the file has set up; and so are those of all
files that need an engine, which is thus started once. They take longest and come first."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.machine import ROOT


@cache
def has_engine(file: str) -> bool:
    """Some test of that file, a path under the repository, has the marker `engine`."""
    return "pytest.mark.engine" in (ROOT / file).read_text()


class ByFile(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file, _, _ = nodeid.partition("::")
        return "engine" if has_engine(file) else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    return ByFile(config, log)  # type: ignore[arg-type]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not has_engine(str(Path(item.path).relative_to(ROOT))))
