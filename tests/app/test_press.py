"""A press that begins something is acted on once, whatever else of the page asks for a run meanwhile."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Locator, Page, WebSocketRoute, expect
from streamlit.proto.WidgetStates_pb2 import WidgetState, WidgetStates
from streamlit.runtime.scriptrunner import RerunData, RerunException
from streamlit.runtime.state import SafeSessionState, SessionState
from streamlit.testing.v1 import AppTest

from app.ui.press import keep_presses
from app.ui.sending import new_form
from core.api.schemas import Dataset
from core.errors import Invalid
from tests.app import test_adapters as adapters
from tests.app import test_datasets as datasets
from tests.app.browser import entry, visit
from tests.app.conftest import Backstage, rows
from tests.app.test_adapters import adapter_files  # noqa: F401
from tests.stack import until

pytestmark = pytest.mark.browser

# ms after the press: its run is about to begin; has begun; waits for the API.
SOON = pytest.mark.parametrize("after_ms", [0, 3, 30])
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


class SlowLine:
    """The console's line to the browser, on which what the console says can be held back; what it is asked passes."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._held: list[str | bytes] | None = None
        page.route_web_socket(re.compile("_stcore/stream"), self._join)

    def _join(self, browser: WebSocketRoute) -> None:
        console = browser.connect_to_server()
        browser.on_message(console.send)
        console.on_message(self._hear)
        self._browser = browser

    def _hear(self, said: str | bytes) -> None:
        if self._held is None:
            self._browser.send(said)
        else:
            self._held.append(said)

    def hold(self) -> None:
        self._held = []

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait in the browser's time: nothing passes on the line while Python sleeps."""

        def look() -> bool:
            self._page.wait_for_timeout(50)
            return condition()

        until(look, 60, what, pause_s=0)

    def let_go(self) -> None:
        held, self._held = self._held or [], None
        for said in held:
            self._browser.send(said)


def ready_to_upload(page: Page, backstage: Backstage, filename: str, count: int) -> Locator:
    """Offer a data set of so many rows; the button that sends it, once it can be pressed."""
    datasets.offer(page, backstage, filename, rows(count))
    button = page.get_by_role("button", name="Upload and check")
    expect(button).to_be_enabled()
    return button


def ready_to_submit(page: Page, backstage: Backstage, dataset: str, adapter: str) -> Locator:
    """Fill the form of a job; the button that submits it, once the form says what the job would take."""
    visit(page, f"{backstage.url}/jobs?view=New+job&new_dataset={dataset}&new_adapter={adapter}", "Jobs")
    expect(page.get_by_text("About ", exact=False).first).to_be_visible()
    return page.get_by_role("button", name="Submit job")


def press_upload(page: Page, name: str, after_ms: int) -> None:
    """Press, and have the page run anew `after_ms` later; it then opens what was stored."""
    entry(page, "Name").fill(name)
    page.wait_for_timeout(1500)
    button = page.get_by_role("button", name="Upload and check")
    expect(button).to_be_enabled()
    button.evaluate(_NAME_CHANGES, after_ms)
    expect(page.get_by_role("button", name=re.compile("All (adapters|data sets)$"))).to_be_visible()


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
    button = ready_to_submit(page, quiet, f"pressed-rows-{after_ms}", name)
    expect(page.get_by_text("Deploy when done", exact=True).first).to_be_visible()
    button.evaluate(_SWITCHES, after_ms)
    expect(page.get_by_role("button", name="All jobs")).to_be_visible()
    assert [job.adapter_name for job in quiet.client.jobs().items].count(name) == 1


def test_a_job_is_opened_though_the_browser_asked_for_its_form_again_before_it_knew(
    page: Page, quiet: Backstage, make_dataset: Callable[[str], Dataset]
) -> None:
    make_dataset("slow-rows")
    line = SlowLine(page)
    button = ready_to_submit(page, quiet, "slow-rows", "slow-job")
    line.hold()
    button.click()
    line.until(lambda: "slow-job" in [job.adapter_name for job in quiet.client.jobs().items], "the job")
    page.wait_for_timeout(1000)  # runs of the page that the job brings about
    page.get_by_text("Deploy when done", exact=True).first.click()
    page.wait_for_timeout(500)
    line.let_go()
    expect(page.get_by_role("button", name="All jobs")).to_be_visible()
    assert "job=job-" in page.url
    assert [job.adapter_name for job in quiet.client.jobs().items].count("slow-job") == 1


def test_a_data_set_is_opened_though_the_browser_asked_for_its_form_again_before_it_knew(
    page: Page, backstage: Backstage
) -> None:
    line = SlowLine(page)
    button = ready_to_upload(page, backstage, "slow-line.jsonl", 21)
    page.wait_for_timeout(1500)
    line.hold()
    button.click()
    line.until(lambda: "slow-line@1" in datasets.names(backstage), "the data set")
    page.wait_for_timeout(1000)  # runs of the page that the data set brings about
    entry(page, "Name").fill("slow-line-x")
    page.wait_for_timeout(1000)
    line.let_go()
    expect(page.get_by_role("button", name="All data sets")).to_be_visible()
    assert "slow-line-x@1" not in datasets.names(backstage)


def test_a_data_set_is_opened_though_the_browser_asked_how_far_it_is_when_it_was_through(
    page: Page, backstage: Backstage
) -> None:
    line = SlowLine(page)
    ready_to_upload(page, backstage, "long-way.jsonl", 30_000).click()
    expect(page.get_by_role("button", name="Cancel")).to_be_visible()
    line.hold()
    line.until(lambda: "long-way@1" in datasets.names(backstage), "the data set")
    page.wait_for_timeout(2000)  # the browser goes on to ask
    line.let_go()
    expect(page.get_by_role("button", name="All data sets")).to_be_visible()


def test_a_run_takes_in_the_press_that_it_came_for_though_another_request_waits() -> None:
    def overtake() -> None:
        raise RerunException(RerunData())

    keep_presses()
    state = SafeSessionState(SessionState(), overtake)
    state.on_script_will_rerun(WidgetStates(widgets=[WidgetState(id="send", trigger_value=True)]))
    assert [widget.id for widget in state.get_widget_states()] == ["send"]


def test_a_press_beside_one_that_failed_does_not_send_again() -> None:
    form, sent = new_form(), []

    def refused(operation: str) -> str:
        sent.append(operation)
        raise Invalid("no", "not this one")

    def page() -> None:
        import streamlit as st

        from app.ui import press, sending

        form = st.session_state["form"]
        sending.collect(form, "here")
        if press.pressed("Send", form, key="send", icon=":material/send:"):
            sending.send(form, "Sending", "sent", st.session_state["refused"])

    app = AppTest.from_function(page)
    app.session_state["form"], app.session_state["refused"] = form, refused
    app.run().button(key="send").click().run()
    assert form["sending"] is not None
    until(lambda: form["sending"].through)
    app.button(key="send").click().run()
    app.run()
    assert not app.exception
    assert len(sent) == 1
