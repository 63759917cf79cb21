"""A page that has just been opened shows its figures before its charts, and later pages of the session all at once."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect
from streamlit.testing.v1 import AppTest

from tests.app.browser import follow
from tests.app.conftest import Backstage


def page() -> None:
    import streamlit as st

    from app.ui.first import content_is_there

    for part in st.session_state["parts"]:
        st.text(f"{part} {content_is_there(part)}")


def shown(app: AppTest, *parts: str) -> list[str]:
    app.session_state["parts"] = parts
    return [text.value for text in app.run().text]


def test_a_part_goes_on_when_it_runs_again() -> None:
    app = AppTest.from_function(page)
    assert shown(app, "figures", "past") == ["figures False", "past False"]
    assert shown(app, "past") == ["past True"]


def test_once_one_went_on_all_others_do_at_once() -> None:
    app = AppTest.from_function(page)
    assert shown(app, "figures") == ["figures False"]
    assert shown(app, "figures", "past") == ["figures True", "past True"]
    assert shown(app, "memory") == ["memory True"]


@pytest.mark.browser
def test_charts_follow_without_anything_pressed(page: Page, backstage: Backstage) -> None:
    page.goto(f"{backstage.url}/memory")
    expect(page.locator(".tile").first).to_be_visible()
    expect(page.locator("canvas")).to_have_count(1)
    follow(page, "Overview")
    expect(page.locator("canvas")).to_have_count(6)
