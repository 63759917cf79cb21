"""Driving the console in Chromium: a browser for the run, a page for each test that must end without an error."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
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


@pytest.fixture(scope="package")
def viewer(chrome: Browser) -> Iterator[BrowserContext]:
    """The viewer of the tests that need no other. What the console's pages are made of it loads once, which took half
    of the time of opening one."""
    viewer = _viewer(chrome)
    yield viewer
    viewer.close()


@pytest.fixture
def faults(tmp_path: Path) -> Iterator[Faults]:
    faults = Faults(tmp_path)
    yield faults
    assert not faults.found, "\n".join(faults.found)


@pytest.fixture
def new_page(chrome: Browser, faults: Faults) -> Iterator[NewPage]:
    """Opens pages, each in a context (a viewer) of its own."""
    viewers: list[BrowserContext] = []

    def open_page(**options: Any) -> Page:
        viewers.append(_viewer(chrome, **options))
        return faults.watch(viewers[-1].new_page())

    yield open_page
    for viewer in viewers:
        faults.take(viewer)
        viewer.close()


@pytest.fixture
def page(viewer: BrowserContext, faults: Faults) -> Iterator[Page]:
    """A page of a viewer who has been nowhere: what the console's pages left in the browser goes after each test."""
    yield faults.watch(viewer.new_page())
    faults.take(viewer)
    for page in viewer.pages:
        if page.url.startswith("http"):  # a blank one has no storage
            page.evaluate("localStorage.clear()")
        page.close()
    viewer.clear_cookies()


def _viewer(
    chrome: Browser,
    *,
    size: dict[str, int] = WIDE,
    scheme: str = "light",
    zone: str = "Europe/Berlin",
    **context: Any,
) -> BrowserContext:
    options = {"viewport": size, "color_scheme": scheme, "timezone_id": zone, "locale": "en-GB", **context}
    return chrome.new_context(**options)  # type: ignore[arg-type]


class Faults:
    """What fails a test whatever it asserts: a script error, an exception of the console, a request to another machine.
    What each page showed last is left in the test's temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.found: list[str] = []
        self._folder, self._shots = folder, 0

    def watch(self, page: Page) -> Page:
        page.set_default_timeout(_PATIENCE_MS)
        page.on("pageerror", lambda error: self.found.append(f"script error: {error}"))
        page.on("request", lambda request: self._look_at(request.url))
        return page

    def _look_at(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https", "ws", "wss") and parts.hostname not in ("127.0.0.1", "localhost"):
            self.found.append(f"request to another machine: {url}")

    def take(self, viewer: BrowserContext) -> None:
        """Of the pages that a viewer has open."""
        for page in viewer.pages:
            page.screenshot(path=self._folder / f"page-{self._shots}.png")
            self._shots += 1
            shown = page.get_by_test_id("stException")
            if shown.count():
                self.found.append(f"exception at {page.url}: {shown.first.inner_text()}")


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


def entry(page: Page, label: str) -> Locator:
    """The input with this label. Not one that another has taken the place of, which Streamlit keeps, unseen, as long as
    the run that drew the other goes on."""
    return page.get_by_label(label, exact=True).and_(page.locator(":not([data-retained] *)"))


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
