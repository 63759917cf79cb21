"""A page stays whole when something of the page before it asks for a refresh while the viewer has already left."""

from __future__ import annotations

import re
from contextlib import suppress
from types import SimpleNamespace

import pytest
from playwright.sync_api import Page, WebSocketRoute, expect
from streamlit.runtime.fragment import MemoryFragmentStorage
from streamlit.runtime.scriptrunner import StopException

from app.ui import stale
from tests.app.browser import follow, visit
from tests.app.conftest import Backstage


class SlowConsole:
    """Holds back what the console sends to a page while `held`; what the page sends arrives at once."""

    def __init__(self, page: Page) -> None:
        self.held = False
        self._waiting: list[str | bytes] = []
        page.route_web_socket(re.compile("_stcore/stream"), self._connect)

    def _connect(self, browser: WebSocketRoute) -> None:
        self._browser = browser
        server = browser.connect_to_server()
        browser.on_message(server.send)
        server.on_message(lambda message: self._waiting.append(message) if self.held else browser.send(message))

    def release(self) -> None:
        self.held = False
        for message in self._waiting:
            self._browser.send(message)


@pytest.mark.browser
def test_a_button_pressed_on_a_page_that_was_left_does_not_empty_the_next(page: Page, backstage: Backstage) -> None:
    console = SlowConsole(page)
    visit(page, f"{backstage.url}/engine", "Engine")
    button = page.get_by_role("button", name="Examine this machine")
    expect(button).to_be_visible()
    console.held = True
    link = page.get_by_test_id("stSidebarNav").get_by_role("link", name="Audit")
    link.evaluate("(link, button) => { link.click(); button.click(); }", button.element_handle())
    page.wait_for_timeout(1500)
    console.release()
    expect(page.get_by_role("heading", level=1, name="Audit")).to_be_visible()
    page.wait_for_timeout(500)
    expect(page.get_by_role("heading", level=1, name="Audit")).to_be_visible()
    follow(page, "Engine")
    expect(button).to_be_visible()


@pytest.mark.parametrize(("replaced", "kept"), [(False, {"own"}), (True, {"own", "other"})])
def test_a_run_that_another_has_replaced_forgets_none_of_the_fragments_of_that_other(
    monkeypatch: pytest.MonkeyPatch, replaced: bool, kept: set[str]
) -> None:
    def ends_what_is_replaced() -> None:
        if replaced:
            raise StopException

    fragments = MemoryFragmentStorage()
    own = SimpleNamespace(new_fragment_ids=SimpleNamespace(snapshot=lambda: frozenset({"own"})))
    run = SimpleNamespace(
        fragment_storage=fragments, shared=own, yield_check=ends_what_is_replaced, fragment_ids_this_run=None
    )
    monkeypatch.setattr(stale, "get_script_run_ctx", lambda: run)
    for name in ("own", "other"):
        fragments.register(name, lambda: None)
    with suppress(StopException):
        stale.end_page()
    assert {name for name in ("own", "other") if fragments.contains(name)} == kept
