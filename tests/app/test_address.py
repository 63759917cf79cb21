"""A page shows what the browser's address names, whatever was lost on the way."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, WebSocketRoute, expect
from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg

from core.api.schemas import Dataset
from tests.app.conftest import Backstage
from tests.app.test_press import ready_to_submit

_LEADS_S = 0.1  # between two refreshes of what leads to what a form has made


class DeafLine:
    """The console's line to the browser, on which the refresh that leads to what a form has made is lost."""

    def __init__(self, page: Page) -> None:
        self.lost = 0
        self._leading: set[str] = set()
        page.route_web_socket(re.compile("_stcore/stream"), self._join)

    def _join(self, browser: WebSocketRoute) -> None:
        console = browser.connect_to_server()

        def hear(said: str | bytes) -> None:
            assert isinstance(said, bytes)
            message = ForwardMsg.FromString(said)
            if message.WhichOneof("type") == "auto_rerun" and message.auto_rerun.interval == pytest.approx(_LEADS_S):
                self._leading.add(message.auto_rerun.fragment_id)
            browser.send(said)

        def ask(asked: str | bytes) -> None:
            assert isinstance(asked, bytes)
            if BackMsg.FromString(asked).rerun_script.fragment_id in self._leading:
                self.lost += 1
            else:
                console.send(asked)

        browser.on_message(ask)
        console.on_message(hear)


@pytest.mark.browser
def test_a_job_is_opened_though_what_leads_to_it_is_lost(
    page: Page, quiet: Backstage, make_dataset: Callable[[str], Dataset]
) -> None:
    make_dataset("deaf-rows")
    line = DeafLine(page)
    ready_to_submit(page, quiet, "deaf-rows", "deaf-job").click()
    expect(page.get_by_role("heading", level=1, name="deaf-job on deaf-rows")).to_be_visible()
    assert line.lost
    assert [job.adapter_name for job in quiet.client.jobs().items].count("deaf-job") == 1
    page.get_by_role("button", name="All jobs").click()
    expect(page.get_by_role("heading", level=1, name="Jobs", exact=True)).to_be_visible()
    page.wait_for_timeout(5000)  # two refreshes of the sidebar
    expect(page.get_by_role("heading", level=1, name="Jobs", exact=True)).to_be_visible()
