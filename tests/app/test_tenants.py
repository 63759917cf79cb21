"""The Tenants page: a tenant, its user and a token, shown once and revoked; signing in with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Page, TimeoutError, expect

from core.client import Client
from core.errors import Unauthorized
from tests.app.browser import entry, shoot, visit
from tests.app.conftest import Backstage, rows

pytestmark = pytest.mark.browser


def test_a_token_is_made_shown_once_used_and_revoked(backstage: Backstage, page: Page) -> None:
    if "acme" not in [tenant.name for tenant in backstage.client.tenants()]:
        backstage.client.create_tenant("acme")
    backstage.client.create_user("ann", "admin", "acme")
    visit(page, f"{backstage.url}/tenants", "Tenants")
    entry(page, "What it is for").fill("reading-room")
    page.get_by_role("combobox", name="User").click()
    page.get_by_role("option", name="ann · acme").click()
    page.get_by_role("button", name="Create token").click()
    shown = page.get_by_test_id("stCode").filter(has_text="harli_").first
    expect(shown).to_be_visible()
    token = shown.inner_text().strip()
    expect(page.get_by_text("cannot be shown again")).to_be_visible()
    shoot(page, "tenants")
    with Client(backstage.client.base_url, token=token) as ann:
        assert (ann.me().user, ann.me().tenant) == ("ann", "acme")
        page.locator("[data-testid=stSidebar]").get_by_text("admin · default").click()
        entry(page, "Sign in as, by API token").fill(token)
        entry(page, "Sign in as, by API token").press("Enter")
        expect(page.locator("[data-testid=stSidebar]").get_by_text("ann · acme")).to_be_visible()
        page.get_by_text("reading-room", exact=True).first.click()
        page.get_by_role("button", name="Revoke").first.click()
        page.get_by_role("button", name="Revoke it").click()
        expect(page.get_by_text("token_revoked")).to_be_visible()
        with pytest.raises(Unauthorized):
            ann.me()
    page.locator("[data-testid=stSidebar]").get_by_text("ann · acme").or_(page.get_by_text("Token refused")).click()
    page.get_by_role("button", name="Sign out").click()
    expect(page.locator("[data-testid=stSidebar]").get_by_text("admin · default")).to_be_visible()


def test_a_download_is_read_as_whoever_is_signed_in(backstage: Backstage, page: Page, tmp_path: Path) -> None:
    if "delta" not in [tenant.name for tenant in backstage.client.tenants()]:
        backstage.client.create_tenant("delta")
    user = backstage.client.create_user("dora", "admin", "delta")
    made = backstage.client.create_token("console", user.id)
    token = made.token
    path = tmp_path / "own.jsonl"
    path.write_bytes(rows(12))
    with Client(backstage.client.base_url, token=token) as dora:
        dataset = dora.upload_dataset(path, "own-rows")
    visit(page, f"{backstage.url}/datasets", "Data sets")
    page.locator("[data-testid=stSidebar]").get_by_text("admin · default").click()
    entry(page, "Sign in as, by API token").fill(token)
    entry(page, "Sign in as, by API token").press("Enter")
    expect(page.locator("[data-testid=stSidebar]").get_by_text("dora · delta")).to_be_visible()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="own-rows").or_(page.get_by_text("own-rows", exact=True)).first.click()
    expect(page.get_by_role("heading", level=1, name="own-rows", exact=True)).to_be_visible()
    with page.expect_download(timeout=20_000) as started:
        page.get_by_role("button", name="Download Parquet").click()
    started.value.save_as(tmp_path / "own.parquet")
    assert (tmp_path / "own.parquet").stat().st_size > 0
    assert dataset.report.rows == 12
    backstage.client.revoke_token(made.id)
    with pytest.raises(TimeoutError), page.expect_download(timeout=4_000):
        page.get_by_role("button", name="Download Parquet").click()
