"""An API of one's own, and plain HTTP to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from core.config import Settings
from tests.api.serving import plain, served


@pytest.fixture
def settings(data_dir: Path) -> Iterator[Settings]:
    with served(data_dir, max_upload_mib=1) as settings:
        yield settings


@pytest.fixture
def http(settings: Settings) -> Iterator[httpx.Client]:
    with plain(settings) as client:
        yield client


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds by which buckets fill: they pass when a test says so, and for nothing else in the process."""
    seconds = [100.0]
    monkeypatch.setattr("core.api.gate.time", SimpleNamespace(monotonic=lambda: seconds[0]))
    return seconds


@pytest.fixture
def http_on_each(data_dir: Path, store_url: str) -> Iterator[httpx.Client]:
    """Plain HTTP to an API on each database."""
    with served(data_dir, database_url=store_url) as settings, plain(settings) as client:
        yield client
