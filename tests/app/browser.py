"""Driving the console in Chromium: a browser for the run, a page for each test that must end without an error."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect, sync_playwright

from tests.machine import ROOT, chromium

WIDE = {"width": 1440, "height": 900}
NARROW = {"width": 390, "height": 844}
_PATIENCE_MS = 60_000
_MAIN = "[data-testid=stMain], [data-testid=stAppScrollToBottomContainer]"

NewPage = Callable[..., Page]


@pytest.fixture(scope="package")
def chrome() -> Iterator[Browser]:
    expect.set_options(timeout=_PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def new_page(chrome: Browser, tmp_path: Path) -> Iterator[NewPage]:
    """Opens pages, each in a context (a viewer) of its own. A script error, an exception of the console or a request
    to another machine fails the test. What each page showed last is left in the test's temporary folder."""
    contexts: list[BrowserContext] = []
    faults: list[str] = []

    def watch(page: Page) -> None:
        page.set_default_timeout(_PATIENCE_MS)
        page.on("pageerror", lambda error: faults.append(f"script error: {error}"))
        page.on("request", lambda request: faults.extend(elsewhere(request.url)))

    def elsewhere(url: str) -> list[str]:
        parts = urlsplit(url)
        remote = parts.scheme in ("http", "https", "ws", "wss") and parts.hostname not in ("127.0.0.1", "localhost")
        return [f"request to another machine: {url}"] if remote else []

    def open_page(
        *, size: dict[str, int] = WIDE, scheme: str = "light", zone: str = "Europe/Berlin", **context: object
    ) -> Page:
        viewer = chrome.new_context(viewport=size, color_scheme=scheme, timezone_id=zone, locale="en-GB", **context)  # type: ignore[arg-type]
        contexts.append(viewer)
        page = viewer.new_page()
        watch(page)
        return page

    yield open_page
    for viewer in contexts:
        for page in viewer.pages:
            page.screenshot(path=tmp_path / f"page-{contexts.index(viewer)}.png")
            shown = page.get_by_test_id("stException")
            if shown.count():
                faults.append(f"exception at {page.url}: {shown.first.inner_text()}")
        viewer.close()
    assert not faults, "\n".join(faults)


@pytest.fixture
def page(new_page: NewPage) -> Page:
    return new_page()


def visit(page: Page, url: str, heading: str | re.Pattern[str]) -> None:
    """Open an address of the console and wait for its heading."""
    page.goto(url)
    expect(page.get_by_role("heading", level=1, name=heading)).to_be_visible()


def follow(page: Page, title: str) -> None:
    """Press a page's link in the navigation."""
    page.get_by_test_id("stSidebarNav").get_by_role("link", name=title).click()
    expect(page.get_by_role("heading", level=1, name=title)).to_be_visible()


def tile(page: Page, label: str) -> Locator:
    """The figure with this label."""
    return page.locator(".tile", has=page.locator(".label", has_text=re.compile(f"^{re.escape(label)}$")))


def choose(page: Page, label: str, option: str) -> None:
    """Choose an option of a select box."""
    page.get_by_role("combobox", name=label).click()
    page.get_by_role("option", name=option, exact=True).click()


def shoot(page: Page, name: str) -> None:
    """Keep a picture of the whole page in docs/screenshots, when HARLI_SCREENSHOTS is set."""
    if not os.environ.get("HARLI_SCREENSHOTS"):
        return
    expect(page.get_by_test_id("stToast")).to_have_count(0)
    folder = ROOT / "docs" / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    size = page.viewport_size or WIDE
    height = page.locator(_MAIN).first.evaluate("node => node.scrollHeight")
    page.set_viewport_size({"width": size["width"], "height": min(int(height), 1600)})
    page.wait_for_timeout(1500)
    # Where this checkout lies is nobody's business.
    places = page.get_by_text(str(ROOT))
    page.screenshot(path=folder / f"{name}.png", mask=[places], mask_color="#dfe3ea")
    page.set_viewport_size({"width": size["width"], "height": size["height"]})
