"""Jobs: a form that keeps what was typed and submits once, the queue, one job live."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Page, expect

from core.api.schemas import Dataset, Job
from tests.app.browser import NewPage, choose, entry, follow, shoot, tile, visit
from tests.app.conftest import Backstage
from tests.clock import far_off
from tests.stack import until

pytestmark = pytest.mark.browser

MakeDataset = Callable[[str], Dataset]


def open_form(page: Page, backstage: Backstage) -> None:
    visit(page, f"{backstage.url}/jobs", "Jobs")
    page.get_by_role("radio", name="New job").click()
    expect(page.get_by_role("button", name="Submit job")).to_be_visible()


def of_adapter(backstage: Backstage, adapter: str) -> list[Job]:
    return [job for job in backstage.client.jobs().items if job.adapter_name == adapter]


def running(backstage: Backstage, job: Job) -> None:
    until(lambda: backstage.client.job(job.id).state == "running", 60, "the job to run")


def query(page: Page) -> dict[str, list[str]]:
    return parse_qs(urlsplit(page.url).query)


def test_the_form_submits_a_job_and_opens_it(page: Page, quiet: Backstage, make_dataset: MakeDataset) -> None:
    make_dataset("form-rows")
    open_form(page, quiet)
    choose(page, "Data set", "form-rows")
    entry(page, "Adapter name").fill("form-adapter")
    expect(page.get_by_text(re.compile(r"About \d+ steps"))).to_be_visible()
    page.get_by_role("radio", name="quick").click()
    page.get_by_role("button", name="Submit job").click()
    expect(page.get_by_role("heading", level=1, name="form-adapter on form-rows", exact=True)).to_be_visible()
    (job,) = of_adapter(quiet, "form-adapter")
    assert query(page)["job"] == [job.id]
    assert not [name for name in query(page) if name.startswith("new_")]
    assert (job.spec.epochs, job.dataset_name) == (1.0, "form-rows")
    page.get_by_role("button", name="All jobs").click()
    page.get_by_role("radio", name="New job").click()
    expect(entry(page, "Adapter name")).to_have_value("")


def test_two_quick_presses_make_one_job(page: Page, quiet: Backstage, make_dataset: MakeDataset) -> None:
    make_dataset("twice-rows")
    open_form(page, quiet)
    choose(page, "Data set", "twice-rows")
    entry(page, "Adapter name").fill("twice-adapter")
    expect(page.get_by_text("About")).to_be_visible()
    page.get_by_role("button", name="Submit job").dblclick()
    expect(page.get_by_role("heading", level=1, name="twice-adapter on twice-rows", exact=True)).to_be_visible()
    time.sleep(2)
    assert len(of_adapter(quiet, "twice-adapter")) == 1
    expect(page.get_by_test_id("stAlert")).to_have_count(0)


def test_a_half_filled_form_survives_reload_page_switch_and_refreshes(
    page: Page, backstage: Backstage, make_dataset: MakeDataset
) -> None:
    make_dataset("kept-rows")
    open_form(page, backstage)
    choose(page, "Data set", "kept-rows")
    entry(page, "Adapter name").fill("kept-adapter")
    page.get_by_text("Expert settings").click()
    rank = entry(page, "Rank")
    rank.fill("4")
    rank.press("Tab")
    expect(page).to_have_url(re.compile("new_rank=4"))

    def expect_kept() -> None:
        expect(entry(page, "Adapter name")).to_have_value("kept-adapter")
        expect(page.get_by_role("combobox", name="Data set")).to_have_value("kept-rows")
        expect(entry(page, "Rank")).to_have_value("4")

    page.wait_for_timeout(4500)
    expect_kept()
    follow(page, "Overview")
    follow(page, "Jobs")
    expect_kept()
    page.reload()
    expect(page.get_by_role("button", name="Submit job")).to_be_visible()
    expect_kept()


def test_what_is_being_typed_outlives_the_refreshes_around_it(page: Page, backstage: Backstage) -> None:
    open_form(page, backstage)
    page.get_by_text("Expert settings").click()
    rate = entry(page, "Learning rate")
    rate.fill("0.0002")
    page.wait_for_timeout(5000)
    expect(rate).to_have_value("0.0002")
    expect(rate).to_be_focused()


def test_a_refusal_says_what_and_where_and_keeps_the_form(
    page: Page, quiet: Backstage, make_dataset: MakeDataset
) -> None:
    make_dataset("busy-rows")
    quiet.client.submit_job(dataset="busy-rows", adapter_name="busy-adapter")
    open_form(page, quiet)
    page.get_by_role("button", name="Submit job").click()
    expect(page.get_by_test_id("stAlert")).to_contain_text("no data set is chosen")
    choose(page, "Data set", "busy-rows")
    entry(page, "Adapter name").fill("busy-adapter")
    expect(page.get_by_text("About")).to_be_visible()
    page.get_by_role("button", name="Submit job").click()
    alert = page.get_by_test_id("stAlert")
    expect(alert).to_contain_text("adapter_name_busy")
    expect(alert).to_contain_text("give another adapter_name")
    expect(entry(page, "Adapter name")).to_have_value("busy-adapter")
    assert len(of_adapter(quiet, "busy-adapter")) == 1


def test_a_running_job_is_followed_live_on_one_canvas(page: Page, quiet: Backstage, make_dataset: MakeDataset) -> None:
    make_dataset("live-rows")
    job = quiet.client.submit_job(dataset="live-rows", adapter_name="live-adapter", evaluate_every=5)
    running(quiet, job)
    visit(page, f"{quiet.url}/jobs?job={job.id}", job.name)
    loss = tile(page, "Loss").locator(".value")
    expect(loss).to_have_text(re.compile(r"^\d\.\d{3}$"))
    page.wait_for_timeout(2500)
    canvas = page.locator("canvas").first.element_handle()
    before, drawn = float(loss.inner_text()), canvas.evaluate("node => node.toDataURL()")
    until(lambda: float(loss.inner_text()) < before, 60, "a lower loss")
    until(lambda: canvas.evaluate("node => node.toDataURL()") != drawn, 60, "the chart to go on")
    assert canvas.evaluate("node => node.isConnected")
    expect(tile(page, "Evaluation loss").locator(".value")).to_have_text(re.compile(r"^\d\.\d{3}$"))
    expect(tile(page, "Time left").locator(".value")).to_have_text(re.compile(r"\d+ s"))
    expect(page.get_by_text("the job began")).to_be_visible()
    expect(page.get_by_text("starting → running")).to_be_visible()


def test_pause_resume_and_stop(page: Page, quiet: Backstage, make_dataset: MakeDataset) -> None:
    make_dataset("held-rows")
    job = quiet.client.submit_job(dataset="held-rows", adapter_name="held-adapter")
    running(quiet, job)
    visit(page, f"{quiet.url}/jobs?job={job.id}", job.name)
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("button", name="Resume")).to_be_enabled()
    assert quiet.client.job(job.id).state == "paused"
    page.get_by_role("button", name="Resume").click()
    expect(page.get_by_role("button", name="Pause")).to_be_enabled()
    running(quiet, job)
    page.get_by_role("button", name="Stop", exact=True).click()
    page.wait_for_timeout(2500)
    page.get_by_role("button", name="Stop and discard").click()
    expect(page.get_by_text("running → cancelled")).to_be_visible()
    expect(page.get_by_role("button", name="Pause")).to_be_disabled()
    assert quiet.client.job(job.id).state == "cancelled"


def test_a_waiting_job_says_why_and_can_be_moved_up(page: Page, quiet: Backstage, make_dataset: MakeDataset) -> None:
    make_dataset("queue-rows")
    first = quiet.client.submit_job(dataset="queue-rows", adapter_name="queue-first")
    running(quiet, first)
    second = quiet.client.submit_job(dataset="queue-rows", adapter_name="queue-second")
    visit(page, f"{quiet.url}/jobs", "Jobs")
    expect(page.get_by_text("one job runs at a time").first).to_be_visible()
    page.get_by_role("button", name=f"Open {second.name}").click()
    expect(page.get_by_role("heading", level=1, name=second.name)).to_be_visible()
    page.get_by_role("button", name="Priority").click()
    entry(page, "Priority (higher runs earlier)").fill("7")
    page.get_by_role("button", name="Set priority").click()
    expect(tile(page, "Resumed")).to_contain_text("priority 7")
    assert quiet.client.job(second.id).priority == 7
    third = quiet.client.submit_job(dataset="queue-rows", adapter_name="queue-third")
    visit(page, f"{quiet.url}/jobs?job={third.id}", third.name)
    expect(page.get_by_text("Number 2 in the queue")).to_be_visible()
    page.get_by_role("button", name="Priority").click()
    page.get_by_role("button", name="Top", exact=True).click()
    expect(page.get_by_text("Number 1 in the queue")).to_be_visible()
    visit(page, f"{quiet.url}/jobs", "Jobs")
    expect(page.get_by_role("button", name=f"Open {third.name}")).to_be_visible()
    shoot(page, "jobs")
    page.get_by_text("Order of 2 waiting jobs").click()
    page.get_by_role("button", name="Down", exact=True).first.click()
    until(lambda: quiet.client.job_queue()[1].id == second.id, 60, "the new order")


def test_a_job_can_be_cloned_into_the_form(page: Page, quiet: Backstage, make_dataset: MakeDataset) -> None:
    make_dataset("clone-rows")
    job = quiet.client.submit_job(
        dataset="clone-rows", adapter_name="clone-adapter", max_steps=123, lora={"rank": 4}, learning_rate=3e-4
    )
    quiet.client.stop_job(job.id)
    visit(page, f"{quiet.url}/jobs?job={job.id}", job.name)
    page.get_by_role("button", name="Clone").click()
    expect(entry(page, "Adapter name")).to_have_value("clone-adapter")
    page.get_by_text("Expert settings").click()
    expect(entry(page, "Optimizer steps")).to_have_value("123")
    expect(entry(page, "Rank")).to_have_value("4")
    expect(entry(page, "Learning rate")).to_have_value("0.000300")


def test_jobs_are_compared_and_schedules_and_webhooks_are_made(
    page: Page, quiet: Backstage, make_dataset: MakeDataset
) -> None:
    make_dataset("many-rows")
    for name, rate in (("fast", 1e-3), ("slow", 1e-4)):
        job = quiet.client.submit_job(dataset="many-rows", adapter_name=name, learning_rate=rate)
        until(lambda job=job: quiet.client.job(job.id).step > 1, 60, "its first steps")
        quiet.client.stop_job(job.id)
    visit(page, f"{quiet.url}/jobs?view=Compare", "Jobs")
    for name in ("fast", "slow"):
        page.get_by_role("combobox", name="Jobs").click()
        page.get_by_role("option", name=re.compile(f"^{name} on many-rows")).click()
    expect(page.get_by_text("learning_rate", exact=True)).to_be_visible()
    expect(page.get_by_text("0.0001", exact=True)).to_be_visible()
    page.keyboard.press("Escape")
    page.get_by_role("radio", name="Schedules").click()
    entry(page, "Name").fill("nightly")
    choose(page, "Data set", "many-rows")
    entry(page, "Adapter name").fill("nightly-adapter")
    page.get_by_role("textbox", name="Cron").fill(far_off())
    page.get_by_role("button", name="Create schedule").click()
    expect(page.get_by_text("many-rows → nightly-adapter")).to_be_visible()
    (schedule,) = quiet.client.schedules().items
    page.get_by_role("button", name="Run now").click()
    expect(page.get_by_text(re.compile("submitted job"))).to_be_visible()
    quiet.client.delete_schedule(schedule.id)
    page.get_by_role("radio", name="Webhooks").click()
    entry(page, "Address").fill("https://10.0.0.1/hook")
    page.get_by_role("button", name="Create webhook").click()
    expect(page.get_by_test_id("stAlert")).to_contain_text("inside the platform's network")
    entry(page, "Address").fill("https://hooks.example/harli")
    page.get_by_role("button", name="Create webhook").click()
    expect(page.get_by_text("whsec_")).to_be_visible()
    (webhook,) = quiet.client.webhooks().items
    quiet.client.delete_webhook(webhook.id)


def test_a_link_to_a_job_that_is_not_there_says_so(page: Page, backstage: Backstage) -> None:
    page.goto(f"{backstage.url}/jobs?job=job_nowhere")
    alert = page.get_by_test_id("stAlert")
    expect(alert).to_contain_text("there is no job job_nowhere")
    expect(alert).to_contain_text("job_not_found")
    page.get_by_role("button", name="Back to the list").click()
    expect(page.get_by_role("heading", level=1, name="Jobs")).to_be_visible()


def test_a_job_goes_on_when_its_tab_is_closed(new_page: NewPage, quiet: Backstage, make_dataset: MakeDataset) -> None:
    make_dataset("tab-rows")
    job = quiet.client.submit_job(dataset="tab-rows", adapter_name="tab-adapter")
    running(quiet, job)
    page = new_page()
    visit(page, f"{quiet.url}/jobs?job={job.id}", job.name)
    page.close()
    step = quiet.client.job(job.id).step
    until(lambda: quiet.client.job(job.id).step > step, 60, "the next step")
    again = new_page()
    visit(again, f"{quiet.url}/jobs", "Jobs")
    again.get_by_role("button", name=f"Open {job.name}").click()
    expect(tile(again, "Loss").locator(".value")).to_have_text(re.compile(r"^\d\.\d{3}$"))
