"""Targets: changed with a version check, in force when the engine says so; what others changed is never overwritten."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.app.browser import choose, entry, follow, tile, visit
from tests.app.conftest import Backstage
from tests.app.peer import SOLO_ITL_MS

pytestmark = pytest.mark.browser


@pytest.fixture
def restored(backstage: Backstage) -> Iterator[Backstage]:
    before = backstage.client.targets().targets
    yield backstage
    backstage.client.set_targets(before)


def switch(page: Page, kind: str) -> None:
    """Turn a kind's target on or off."""
    page.get_by_test_id("stCheckbox").filter(has_text=kind).locator("label").click()


def in_store(backstage: Backstage) -> dict[str, tuple[float, float]]:
    return {target.kind: (target.ms, target.quantile) for target in backstage.client.targets().targets}


def test_the_default_is_explained(page: Page, backstage: Backstage) -> None:
    assert backstage.client.targets().origin == "measured", "this test comes before those that set targets"
    visit(page, f"{backstage.url}/targets", "Targets")
    expect(page.get_by_text(f"The default: 3.0 × the median ITL of {SOLO_ITL_MS:.1f} ms")).to_be_visible()


def test_a_changed_target_is_in_force(page: Page, restored: Backstage) -> None:
    visit(page, f"{restored.url}/targets", "Targets")
    entry(page, "ITL target, ms").fill("45.5")
    switch(page, "TTFT")
    entry(page, "TTFT target, ms").fill("900")
    entry(page, "TTFT target, ms").press("Tab")
    version = restored.client.targets().version + 1
    page.get_by_role("button", name="Apply").click()
    expect(page.get_by_text(f"version {version} in force in the engine")).to_be_visible()
    assert in_store(restored) == {"itl": (45.5, 0.99), "ttft": (900.0, 0.99)}
    expect(tile(page, "ITL p99 now")).to_contain_text("target 45.5")


def test_a_target_that_is_switched_off_is_dropped(page: Page, restored: Backstage) -> None:
    restored.client.set_targets([{"kind": "itl", "ms": 70}, {"kind": "tpot", "ms": 80}])
    visit(page, f"{restored.url}/targets", "Targets")
    expect(entry(page, "TPOT target, ms")).to_have_value("80.0")
    switch(page, "TPOT")
    expect(entry(page, "TPOT target, ms")).to_be_disabled()
    page.get_by_role("button", name="Apply").click()
    expect(tile(page, "TPOT p99 now")).to_contain_text("no target")
    assert in_store(restored) == {"itl": (70.0, 0.99)}


def test_a_target_of_nothing_is_refused_and_nothing_changes(page: Page, restored: Backstage) -> None:
    before = restored.client.targets()
    visit(page, f"{restored.url}/targets", "Targets")
    entry(page, "ITL target, ms").fill("0")
    entry(page, "ITL target, ms").press("Tab")
    page.get_by_role("button", name="Apply").click()
    expect(page.get_by_test_id("stAlert")).to_contain_text("targets.0.ms")
    expect(page.get_by_test_id("stAlert")).to_contain_text("greater than 0")
    assert restored.client.targets().version == before.version


def test_a_change_from_elsewhere_is_shown_with_both_values(page: Page, restored: Backstage) -> None:
    restored.client.set_targets([{"kind": "itl", "ms": 66}])
    visit(page, f"{restored.url}/targets", "Targets")
    entry(page, "ITL target, ms").fill("77")
    entry(page, "ITL target, ms").press("Tab")
    restored.client.set_targets([{"kind": "itl", "ms": 88}])
    notice = page.get_by_test_id("stAlert")
    expect(notice).to_contain_text("The targets were changed elsewhere")
    expect(notice).to_contain_text("Stored now: ITL p99 ≤ 88.0 ms")
    expect(notice).to_contain_text("Your form: ITL p99 ≤ 77.0 ms")
    expect(entry(page, "ITL target, ms")).to_have_value("77.0")
    page.get_by_role("button", name="Put mine over them").click()
    expect(page.get_by_text("The targets were changed elsewhere")).to_have_count(0)
    assert in_store(restored) == {"itl": (77.0, 0.99)}


def test_a_press_that_comes_too_late_changes_nothing(page: Page, restored: Backstage) -> None:
    restored.client.set_targets([{"kind": "itl", "ms": 66}])
    visit(page, f"{restored.url}/targets", "Targets")
    field = entry(page, "ITL target, ms")
    field.fill("77")
    field.press("Tab")
    page.wait_for_timeout(1500)
    # Between two refreshes: the page cannot have seen the other change when the button is pressed.
    restored.client.set_targets([{"kind": "itl", "ms": 88}])
    page.get_by_role("button", name="Apply").click()
    expect(page.get_by_test_id("stAlert").filter(has_text="targets_moved")).to_be_visible()
    assert in_store(restored) == {"itl": (88.0, 0.99)}
    page.get_by_role("button", name="Take the stored ones").click()
    expect(field).to_have_value("88.0")
    expect(page.get_by_test_id("stAlert")).to_have_count(0)


def test_what_the_form_does_not_know_is_kept(page: Page, restored: Backstage) -> None:
    restored.client.set_targets(
        [{"kind": "itl", "ms": 60}, {"kind": "itl", "ms": 40, "quantile": 0.5}, {"kind": "ttft", "ms": 900}]
    )
    visit(page, f"{restored.url}/targets", "Targets")
    expect(page.locator("td", has_text="ITL p50 ≤ 40.0 ms")).to_be_visible()
    entry(page, "ITL target, ms").fill("61")
    entry(page, "ITL target, ms").press("Tab")
    page.get_by_role("button", name="Apply").click()
    expect(tile(page, "ITL p99 now")).to_contain_text("target 61.0")
    kept = {(target.kind, target.ms, target.quantile) for target in restored.client.targets().targets}
    assert kept == {("itl", 61.0, 0.99), ("itl", 40.0, 0.5), ("ttft", 900.0, 0.99)}


def test_a_tenant_that_has_nothing_yet_can_be_given_a_target(page: Page, restored: Backstage) -> None:
    restored.client.create_tenant("newcomer")
    visit(page, f"{restored.url}/targets", "Targets")
    page.get_by_role("button", name="Add a target").click()
    choose(page, "Of", "newcomer")
    field = entry(page, "ms")
    field.fill("30")
    field.press("Tab")
    page.get_by_role("button", name="Add", exact=True).click()
    expect(page.locator("td", has_text="newcomer")).to_be_visible()
    assert [target.tenant for target in restored.client.targets().targets if target.tenant] == ["newcomer"]


def test_a_half_typed_target_survives_page_switch_and_reload(page: Page, backstage: Backstage) -> None:
    visit(page, f"{backstage.url}/targets", "Targets")
    switch(page, "TTFT")
    field = entry(page, "TTFT target, ms")
    field.fill("1234")
    field.press("Tab")
    expect(page).to_have_url(re.compile("ttft_ms=1234"))
    follow(page, "Overview")
    follow(page, "Targets")
    expect(field).to_have_value("1234.0")
    page.reload()
    expect(field).to_have_value("1234.0")
