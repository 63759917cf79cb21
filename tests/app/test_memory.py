"""Memory: who holds the arena's pages, and what changed hands."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from core.api.schemas import Dataset
from tests.app.browser import tile, visit
from tests.app.conftest import Backstage

pytestmark = pytest.mark.browser


def test_the_arena_is_shown_with_those_who_share_it(
    page: Page, quiet: Backstage, make_dataset: Callable[[str], Dataset]
) -> None:
    visit(page, f"{quiet.url}/memory", "Memory")
    expect(tile(page, "KV cache")).to_contain_text("8,192")
    expect(tile(page, "Finetuning")).to_contain_text("0 B")
    expect(page.locator("canvas")).to_have_count(1)
    expect(page.get_by_text("Nothing yet: a job takes memory")).to_be_visible()
    make_dataset("memory-rows")
    quiet.client.submit_job(dataset="memory-rows", adapter_name="memory-adapter")
    expect(tile(page, "KV cache")).to_contain_text("6,144")
    expect(tile(page, "Finetuning")).to_contain_text("160.0 MiB")
    expect(tile(page, "Finetuning")).to_contain_text("gave memory up 3 times, last in 31.4 ms")
