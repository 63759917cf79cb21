"""Playground without an engine that answers: what it says then. Chatting itself is tested with the engine."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.app.browser import visit
from tests.app.conftest import Backstage

pytestmark = pytest.mark.browser


def test_without_a_deployed_adapter_it_says_where_one_comes_from(page: Page, backstage: Backstage) -> None:
    visit(page, f"{backstage.url}/playground", "Playground")
    expect(page.get_by_text("No adapter is deployed")).to_be_visible()


def test_an_engine_that_does_not_answer_is_said_in_the_answers_place(page: Page, backstage: Backstage) -> None:
    visit(page, f"{backstage.url}/playground", "Playground")
    box = page.get_by_test_id("stChatInput").get_by_role("textbox")
    box.fill("Who are you?")
    box.press("Enter")
    alerts = page.get_by_test_id("stChatMessage").get_by_test_id("stAlert")
    expect(alerts).to_have_count(2)
    expect(alerts.first).to_contain_text("engine_unreachable")
    page.get_by_role("button", name="Clear").click()
    expect(page.get_by_test_id("stChatMessage")).to_have_count(0)
