"""The console without an API: every page says so, with code and remedy, and recovers by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from tests.machine import ROOT
from tests.stack import free_ports

PAGES = sorted(path.name for path in (ROOT / "app" / "views").glob("*.py"))


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> int:
    """A port that nothing listens on, as the API's."""
    (port,) = free_ports(1)
    monkeypatch.setenv("HARLI_API_PORT", str(port))
    monkeypatch.setenv("HARLI_DATA_DIR", str(tmp_path))
    st.cache_resource.clear()
    st.cache_data.clear()
    return port


@pytest.mark.parametrize("view", PAGES)
def test_every_page_says_that_the_api_is_away(nowhere: int, view: str) -> None:
    app = AppTest.from_file(str(ROOT / "app" / "main.py"), default_timeout=30).run()
    app.switch_page(f"views/{view}").run()
    assert not app.exception
    assert app.error, "no error is shown"
    text = app.error[0].value
    assert "api_unreachable" in text
    assert str(nowhere) in text
    assert "harli up" in text
