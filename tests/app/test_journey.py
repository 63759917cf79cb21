"""The whole journey in the browser, on the real engine: upload, submit, watch, move a target, stop, chat."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from core.api.schemas import Job
from core.client import TERMINAL, Client
from core.errors import HarliError
from tests.app.browser import choose, entry, follow, shoot, tile, visit
from tests.machine import ROOT
from tests.stack import Stack, until

pytestmark = [pytest.mark.browser, pytest.mark.engine]

NAME = "captain-console"
_SAMPLE = ROOT / "sample_data" / "captain.jsonl"
_PROMPTS = (ROOT / "sample_data" / "prompts.txt").read_text().splitlines()
_LONG_MS = 240_000  # for a machine that is busy with other tests; how fast it is, is not asked here
_JOB_S = 420
_NEWEST = 3  # steps whose losses are taken together: that of one batch is as good as the batch


@pytest.fixture
def traffic(stack: Stack) -> Iterator[threading.Event]:
    """One request after the other, until the event is set."""
    ended = threading.Event()

    def ask_on() -> None:
        with Client(stack.settings.api_url, token=stack.settings.token_file) as client:
            for at in range(10_000):
                prompt = _PROMPTS[at % len(_PROMPTS)]
                try:
                    for _ in client.chat(prompt, max_tokens=24, temperature=0.7):
                        if ended.is_set():
                            return
                except HarliError:
                    ended.wait(1)
                if ended.wait(5):
                    return

    thread = threading.Thread(target=ask_on, name="traffic")
    thread.start()
    yield ended
    ended.set()
    thread.join(30)


def ask(page: Page, question: str) -> None:
    box = page.get_by_test_id("stChatInput").get_by_role("textbox")
    box.fill(question)
    box.press("Enter")


def upload(page: Page, stack: Stack) -> None:
    visit(page, f"{stack.console_url}/datasets", "Data sets")
    page.set_input_files("input[type=file]", _SAMPLE)
    entry(page, "Name").fill(NAME)
    button = page.get_by_role("button", name="Upload and check")
    expect(button).to_be_enabled()
    button.click()
    expect(page.get_by_role("heading", level=1, name=NAME, exact=True)).to_be_visible(timeout=_LONG_MS)
    expect(tile(page, "Rows").locator(".value")).to_have_text("217")
    page.get_by_role("tab", name="Packed batch").click()
    expect(page.locator("[data-packed]")).to_contain_text("Fair winds!")
    shoot(page, "dataset")


def submit(page: Page, client: Client) -> Job:
    page.get_by_role("link", name="Train on it").click()
    entry(page, "Adapter name").fill(NAME)
    page.get_by_text("Expert settings").click()
    page.get_by_role("radio", name="steps").click()
    fill(page, "Optimizer steps", "400")
    fill(page, "Learning rate", "0.003")
    fill(page, "Tokens per micro-batch", "128")
    expect(page.get_by_text("About 400 steps")).to_be_visible()
    shoot(page, "new-job")
    page.get_by_role("button", name="Submit job").click()
    expect(page.get_by_role("heading", level=1, name=f"{NAME} on {NAME}", exact=True)).to_be_visible(timeout=_LONG_MS)
    (job,) = [job for job in client.jobs().items if job.adapter_name == NAME]
    return job


def fill(page: Page, label: str, value: str) -> None:
    field = entry(page, label)
    expect(field).to_be_enabled()
    field.fill(value)
    field.press("Tab")


def watch_the_loss_fall(page: Page, client: Client, job: Job) -> float:
    """The job's first loss, which the page need not have shown: by then there may be others."""
    step, loss = tile(page, "Step").locator(".value"), tile(page, "Loss").locator(".value")
    expect(step).to_have_text(re.compile(r"^[1-9]"), timeout=_LONG_MS)
    first = client.job(job.id).first_loss
    assert first is not None
    until(lambda: float(loss.inner_text()) < 0.8 * first, _LONG_MS / 1000, "the loss to fall")
    return first


def move_the_target(page: Page, client: Client) -> None:
    before = client.targets()
    follow(page, "Targets")
    field = entry(page, "ITL target, ms")
    wanted = 2 * float(field.input_value())
    field.fill(str(wanted))
    field.press("Tab")
    page.get_by_role("button", name="Apply").click()
    expect(page.get_by_text(f"version {before.version + 1} in force in the engine")).to_be_visible()
    expect(tile(page, "ITL p99 now")).to_contain_text(re.compile(r"target \d"))
    client.set_targets(before.targets)


def look_at_the_memory(page: Page) -> None:
    """Who holds the engine's memory while a job trains beside requests."""
    follow(page, "Memory")
    page.get_by_role("radio", name="1 min").click()
    expect(tile(page, "Finetuning").locator(".value")).to_have_text(re.compile(r"^[1-9]"))
    expect(page.locator("canvas")).to_have_count(1)
    shoot(page, "memory")


def look_at_the_overview(page: Page, client: Client, job: Job, first: float) -> None:
    """Until the loss is half of what it was at first: from there the adapter speaks as the data set does."""

    def has_learnt() -> bool:
        losses = [metric.loss for metric in client.job_metrics(job.id) if metric.loss is not None][-_NEWEST:]
        return len(losses) == _NEWEST and sum(losses) / _NEWEST < first / 2

    follow(page, "Overview")
    page.get_by_role("radio", name="1 min").click()
    until(has_learnt, _JOB_S, "most of what it learns", pause_s=1.0)
    expect(tile(page, "ITL p99").locator(".value")).to_have_text(re.compile(r"\d"))
    expect(tile(page, "Finetune").locator(".value")).not_to_have_text("0.0")
    expect(page.locator("canvas").nth(5)).to_be_visible()
    shoot(page, "overview")
    page.emulate_media(color_scheme="dark")
    expect(page.get_by_test_id("stApp")).to_have_css("background-color", "rgb(18, 21, 28)")
    shoot(page, "overview-dark")
    page.emulate_media(color_scheme="light")


def read_the_frontier(page: Page, client: Client) -> None:
    """What a looser target would give, from what the engine has learnt of itself while it trained."""
    until(lambda: client.frontier().source == "learnt", _JOB_S, "the engine to know itself", pause_s=1.0)
    follow(page, "Targets")
    page.get_by_role("button", name="Take the stored ones").click()
    expect(page.get_by_text("The targets were changed elsewhere")).to_have_count(0)
    expect(page.get_by_text("Finetune throughput against the target")).to_be_visible(timeout=_LONG_MS)
    expect(tile(page, "Finetune would get").locator(".value")).to_have_text(re.compile(r"\d"))
    shoot(page, "targets")
    follow(page, "Engine")
    expect(page.get_by_text("tasklet_slices").first).to_be_visible()
    shoot(page, "engine")
    follow(page, "Alerts")
    expect(page.get_by_text("engine-down").first).to_be_visible()
    shoot(page, "alerts")


def stop_and_keep(page: Page, client: Client, job: Job) -> None:
    page.get_by_test_id("stMain").get_by_role("link", name=job.name).click()
    expect(page.get_by_role("heading", level=1, name=job.name, exact=True)).to_be_visible()
    shoot(page, "job")
    page.get_by_role("button", name="Stop", exact=True).click()
    page.get_by_role("button", name="Stop and keep the adapter").click()
    until(lambda: client.job(job.id).state in TERMINAL, _JOB_S, "the job's end", pause_s=1.0)
    expect(page.get_by_text("saving → succeeded")).to_be_visible()


def chat_with_both(page: Page, client: Client) -> None:
    until(lambda: client.adapter(NAME).deployment == "deployed", 60, "the adapter's deployment")
    page.get_by_role("link", name=f"adapter {NAME}@1").click()
    expect(page.get_by_text("deployed v1")).to_be_visible()
    shoot(page, "adapter")
    page.get_by_role("link", name="Chat with it").click()
    expect(page.get_by_role("combobox", name="Right")).to_have_value(NAME)
    ask(page, "Where is Madrid?")
    summaries = page.get_by_test_id("stChatMessage").get_by_text(re.compile(r"\d+ tokens · \d+ in the prompt"))
    expect(summaries).to_have_count(2, timeout=_LONG_MS)
    sides = page.get_by_test_id("stColumn")
    expect(sides.nth(1)).to_contain_text("Aye")
    expect(sides.nth(0)).not_to_contain_text("Aye")
    shoot(page, "playground")
    choose(page, "Right", "base model")
    expect(sides.nth(1)).not_to_contain_text("Aye")
    choose(page, "Right", NAME)
    expect(sides.nth(1)).to_contain_text("Aye")


def test_from_a_file_to_an_adapter_that_answers(page: Page, stack: Stack, traffic: threading.Event) -> None:
    upload(page, stack)
    job = submit(page, stack.client)
    first = watch_the_loss_fall(page, stack.client, job)
    move_the_target(page, stack.client)
    look_at_the_memory(page)
    look_at_the_overview(page, stack.client, job, first)
    stop_and_keep(page, stack.client, job)
    read_the_frontier(page, stack.client)
    traffic.set()
    visit(page, f"{stack.console_url}/jobs?job={job.id}", job.name)
    chat_with_both(page, stack.client)


def answers_of(page: Page, tokens: int) -> None:
    page.get_by_role("button", name="Sampling").click()
    fill(page, "Longest answer, tokens", str(tokens))
    page.keyboard.press("Escape")


def test_an_answer_can_be_stopped(page: Page, stack: Stack) -> None:
    visit(page, f"{stack.console_url}/playground?both=false", "Playground")
    answers_of(page, tokens=2000)
    ask(page, "Write a very long story about a ship and its captain.")
    answer = page.get_by_test_id("stChatMessage").nth(1)
    expect(answer).to_contain_text(re.compile(r"\w+ \w+"), timeout=_LONG_MS)
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(answer).to_contain_text("stopped")
    until(lambda: (now := stack.client.live().now) is not None and now.running == 0, 60, "the engine to stop it")


def test_what_has_streamed_is_there_after_a_page_switch(page: Page, stack: Stack) -> None:
    visit(page, f"{stack.console_url}/playground?both=false", "Playground")
    answers_of(page, tokens=60)
    ask(page, "Name three rivers.")
    expect(page.get_by_test_id("stChatMessage")).to_have_count(2)
    follow(page, "Targets")
    follow(page, "Playground")
    expect(page.get_by_text("Name three rivers.")).to_be_visible()
    expect(page.get_by_text(re.compile(r"\d+ tokens · "))).to_be_visible(timeout=_LONG_MS)
