"""Overview: the live figures, drawn in place; what is wrong with a part is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from playwright.sync_api import Page, expect

from core.api.schemas import Dataset
from tests.app.browser import NARROW, NewPage, follow, tile, visit
from tests.app.conftest import Backstage
from tests.app.peer import SOLO_ITL_MS
from tests.stack import until

pytestmark = pytest.mark.browser

MakeDataset = Callable[[str], Dataset]

# Marks each chart's canvas and each tile, and takes the canvases' content.
_REMEMBER = """() => {
  window.kept = [...document.querySelectorAll('canvas')];
  window.drawn = window.kept.map(canvas => canvas.toDataURL());
  return window.kept.length;
}"""
_COMPARE = """() => {
  const now = [...document.querySelectorAll('canvas')];
  return {
    same: now.length === window.kept.length && now.every((canvas, at) => canvas === window.kept[at]),
    moved: now.filter((canvas, at) => canvas.toDataURL() !== window.drawn[at]).length,
  };
}"""


def test_the_figures_stand_beside_their_target(page: Page, backstage: Backstage) -> None:
    visit(page, backstage.url, "Overview")
    expect(tile(page, "ITL p99")).to_contain_text(f"target {3 * SOLO_ITL_MS:.1f} ms")
    for label in ("ITL p50", "Attainment", "Decode", "Finetune", "Batch", "Device in use", "KV cache", "TTFT"):
        expect(tile(page, label)).to_be_visible()
    expect(tile(page, "Stalls by prefill")).to_contain_text("apart from the ITL")
    expect(page.get_by_text("tasklet_slices")).to_be_visible()


def test_charts_are_redrawn_on_the_canvas_they_have(page: Page, backstage: Backstage) -> None:
    visit(page, backstage.url, "Overview")
    expect(page.locator("canvas").nth(5)).to_be_visible()
    page.wait_for_timeout(2500)

    def have_all_moved() -> bool:
        now = page.evaluate(_COMPARE)
        assert now["same"], "a chart was made anew"
        return bool(now["moved"] == charts)

    for _refresh in range(2):
        charts = page.evaluate(_REMEMBER)
        until(have_all_moved, 60, "all charts to go on")


def test_a_figure_changes_in_the_element_it_has(page: Page, backstage: Backstage) -> None:
    visit(page, backstage.url, "Overview")
    value = tile(page, "ITL p50").locator(".value")
    before = value.inner_text()
    element = value.element_handle()
    expect(value).not_to_have_text(before)
    assert element.evaluate("node => node.isConnected")


def test_a_crashed_part_is_shown_with_its_message(page: Page, backstage: Backstage) -> None:
    part = {
        "name": "demo",
        "state": "backing_off",
        "restarts": 3,
        "message": "it ended with status 1; next try in 8 s",
        "since": datetime.now(UTC).isoformat(),
    }
    noted = backstage.data_dir / "run" / "parts.json"
    noted.write_text(json.dumps([part]))
    try:
        visit(page, backstage.url, "Overview")
        expect(page.get_by_text("demo crashed and starts again soon")).to_be_visible()
        expect(page.get_by_text("next try in 8 s").first).to_be_visible()
    finally:
        noted.unlink()
    expect(page.get_by_text("demo crashed")).to_have_count(0)


def test_a_narrow_dark_screen_needs_no_sideways_scrolling(new_page: NewPage, backstage: Backstage) -> None:
    page = new_page(size=NARROW, scheme="dark")
    box = page.locator("[data-testid=stMainBlockContainer]")
    paths = ["", "jobs", "jobs?view=New+job", "datasets", "adapters", "playground", "targets", "alerts", "engine"]
    for path in paths:
        page.goto(f"{backstage.url}/{path}")
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        page.wait_for_timeout(1500)
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), path
        assert box.evaluate("node => node.scrollWidth <= node.clientWidth + 1"), path


def test_a_note_of_a_figure_is_whole_on_a_narrow_page(new_page: NewPage, backstage: Backstage) -> None:
    page = new_page(size={**NARROW, "width": 320})
    visit(page, f"{backstage.url}/", "Overview")
    note = tile(page, "Device in use").locator(".note")
    expect(note).to_contain_text("finetune")
    assert note.evaluate("node => node.scrollWidth <= node.clientWidth")


def test_pages_can_be_switched_at_any_moment_of_a_refresh(
    page: Page, quiet: Backstage, make_dataset: MakeDataset
) -> None:
    make_dataset("switch-rows")
    job = quiet.client.submit_job(dataset="switch-rows", adapter_name="switch-adapter")
    visit(page, quiet.url, "Overview")
    for moment_ms in range(0, 1000, 200):
        link = page.get_by_test_id("stMain").get_by_role("link", name=job.name)
        expect(link).to_be_visible()
        page.wait_for_timeout(moment_ms)
        link.click()
        expect(page.get_by_role("heading", level=1, name=job.name, exact=True)).to_be_visible()
        expect(tile(page, "Loss")).to_be_visible()
        page.wait_for_timeout(moment_ms)
        follow(page, "Overview")
