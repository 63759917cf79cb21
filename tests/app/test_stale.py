"""A page stays whole when something of the page before it asks for a refresh while the viewer has already left."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, WebSocketRoute, expect
from streamlit.testing.v1 import AppTest

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


@pytest.mark.parametrize("replaced", [False, True])
def test_a_run_that_another_has_replaced_forgets_none_of_the_fragments_of_that_other(replaced: bool) -> None:
    def page() -> None:
        import streamlit as st
        from streamlit.runtime.scriptrunner import get_script_run_ctx

        from app.ui.stale import end_page

        context = get_script_run_ctx()
        assert context is not None and context.script_requests is not None
        context.fragment_storage.register("other", lambda: None)
        st.fragment(lambda: None)()
        st.session_state.update(fragments=context.fragment_storage, own=context.shared.new_fragment_ids.snapshot())
        if st.session_state["replaced"]:
            context.script_requests.request_stop()  # as Streamlit's session does when it makes another runner
        end_page()

    app = AppTest.from_function(page)
    app.session_state["replaced"] = replaced
    app.run()
    assert not app.exception
    (own,) = app.session_state["own"]
    fragments = app.session_state["fragments"]
    assert fragments.contains(own)
    assert fragments.contains("other") == replaced
