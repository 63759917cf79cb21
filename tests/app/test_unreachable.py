"""The console without an API: every page says so, with code and remedy, and recovers by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import streamlit as st
from playwright.sync_api import Page, expect
from streamlit.testing.v1 import AppTest

from core.config import EngineSettings, Settings
from tests.app.browser import follow
from tests.app.conftest import console
from tests.machine import ROOT
from tests.stack import free_ports, running

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


@pytest.mark.browser
def test_pages_recover_when_the_api_comes_up(
    page: Page, tmp_path_factory: pytest.TempPathFactory, bundled_model: Path
) -> None:
    api, engine, port = free_ports(3)
    settings = Settings(
        data_dir=tmp_path_factory.mktemp("late-api"),
        api_port=api,
        engine_port=engine,
        console_port=port,
        engine=EngineSettings(model=bundled_model),
    )
    with console(settings, tmp_path_factory.mktemp("late-console")):
        page.goto(f"{settings.console_url}/jobs")
        expect(page.get_by_text("api_unreachable")).to_be_visible()
        follow(page, "Overview")
        expect(page.get_by_text("api_unreachable")).to_be_visible()
        expect(page.get_by_text("API unreachable")).to_be_visible()
        with running(settings, "core.api"):
            # The live part asks again by itself; nothing was pressed.
            expect(page.get_by_text("Nothing is served yet")).to_be_visible(timeout=60_000)
            expect(page.get_by_text("API unreachable")).to_have_count(0)
            expect(page.get_by_text("engine not there yet")).to_be_visible()
            follow(page, "Jobs")
            expect(page.get_by_text("No job yet")).to_be_visible()
            page.get_by_text("From a shell or over HTTP").click()
            expect(page.get_by_text("harli submit --dataset")).to_be_visible()
