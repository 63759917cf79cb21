"""A press that begins something is acted on once, whatever else of the page asks for a run meanwhile."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from core.api.schemas import Dataset
from tests.app import test_adapters as adapters
from tests.app import test_datasets as datasets
from tests.app.browser import visit
from tests.app.conftest import Backstage, rows
from tests.app.test_adapters import adapter_files  # noqa: F401

pytestmark = pytest.mark.browser

# ms after the press: its run has begun, and waits for the API. Before it has, Streamlit itself can drop a press.
SOON = pytest.mark.parametrize("after_ms", [30, 60])
_NAME_CHANGES = """(button, ms) => {
    const field = document.querySelector('input[aria-label="Name"]');
    const set = Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value').set;
    button.click();
    setTimeout(() => {
        field.focus();
        set.call(field, field.value + '-x');
        field.dispatchEvent(new Event('input', {bubbles: true}));
        field.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter', bubbles: true}));
    }, ms);
}"""
_SWITCHES = """(button, ms) => {
    const toggle = document.querySelector('input[aria-label="Deploy when done"]');
    button.click();
    setTimeout(() => toggle.click(), ms);
}"""


def press_upload(page: Page, name: str, after_ms: int) -> None:
    """Press, and have the page run anew `after_ms` later; it then opens what was stored."""
    page.get_by_label("Name", exact=True).fill(name)
    page.wait_for_timeout(1500)
    button = page.get_by_role("button", name="Upload and check")
    expect(button).to_be_enabled()
    button.evaluate(_NAME_CHANGES, after_ms)
    expect(page.get_by_role("button", name=re.compile("All (adapters|data sets)$"))).to_be_visible(timeout=15_000)


@SOON
def test_an_adapter_is_uploaded_once(
    page: Page,
    backstage: Backstage,
    adapter_files: dict[str, bytes],  # noqa: F811
    after_ms: int,
) -> None:
    adapters.offer(page, backstage, {"pressed.zip": adapters.zipped(adapter_files)})
    press_upload(page, f"pressed-{after_ms}", after_ms)
    assert len([name for name in adapters.names(backstage) if name.startswith(f"pressed-{after_ms}")]) == 1


@SOON
def test_a_data_set_is_uploaded_once(page: Page, backstage: Backstage, after_ms: int) -> None:
    datasets.offer(page, backstage, "pressed.jsonl", rows(30 + after_ms))
    press_upload(page, f"pressed-{after_ms}", after_ms)
    assert len([name for name in datasets.names(backstage) if name.startswith(f"pressed-{after_ms}")]) == 1


@SOON
def test_a_job_is_submitted_once(
    page: Page, quiet: Backstage, make_dataset: Callable[[str], Dataset], after_ms: int
) -> None:
    make_dataset(f"pressed-rows-{after_ms}")
    name = f"pressed-job-{after_ms}"
    visit(page, f"{quiet.url}/jobs?view=New+job&new_dataset=pressed-rows-{after_ms}&new_adapter={name}", "Jobs")
    button = page.get_by_role("button", name="Submit job")
    expect(page.get_by_text("About ", exact=False).first).to_be_visible()
    button.evaluate(_SWITCHES, after_ms)
    expect(page.get_by_role("button", name="All jobs")).to_be_visible(timeout=15_000)
    assert [job.adapter_name for job in quiet.client.jobs().items].count(name) == 1
