"""The Audit page: what was done and what was refused, found by text and outcome, each field before and after."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from core.errors import NotFound
from tests.app.browser import choose, entry, shoot, visit
from tests.app.conftest import Backstage

pytestmark = pytest.mark.browser


def test_a_change_and_a_refusal_are_found_and_opened(backstage: Backstage, page: Page) -> None:
    user = backstage.client.create_user("una", "viewer")
    backstage.client.update_user(user.id, role="operator")
    with pytest.raises(NotFound):
        backstage.client.delete_dataset("ds-gone")
    visit(page, f"{backstage.url}/audit", "Audit")
    entry(page, "Action or object").fill("users")
    entry(page, "Action or object").press("Enter")
    page.get_by_text("PATCH /api/users/{user_id}").first.click()
    shown = page.locator(".st-key-entry")
    expect(shown.get_by_text("PATCH")).to_be_visible()
    expect(shown.get_by_text("changed")).to_be_visible()
    shoot(page, "audit")
    entry(page, "Action or object").fill("ds-gone")
    entry(page, "Action or object").press("Enter")
    choose(page, "Outcome", "refused")
    expect(page.get_by_text("dataset_not_found")).to_be_visible()
    expect(page.get_by_text("PATCH /api/users/{user_id}")).to_have_count(0)
