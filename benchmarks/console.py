"""How long the console takes, with 10,000 jobs in the store: each page to its first content, a target to be in force.

``python -m benchmarks.console``: API and console as processes, the tests' peer in the engine's place (it reports
figures and trains on paper, so that the page is what is measured and not a model), Chromium on the same machine. A page
is opened by its address and by the navigation, several times; content is its heading and the first row, tile or field
that needs the API. The page looks at every frame whether that is visible, so that times are a frame's apart. What
Streamlit itself takes is measured in between: an app of two pages with nothing but a heading. At the end
a target is moved, several times: from the press of Apply until the page says that the engine has it in force.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from statistics import median

from playwright.sync_api import Page, sync_playwright

from benchmarks import record
from core.client import Client
from core.config import EngineSettings, Settings
from core.serving import model_folder
from db.base import now
from db.jobs import JobEventRecord, JobRecord
from db.store import Store
from tests.app.conftest import answers, console, listens
from tests.app.peer import Peer
from tests.machine import ROOT, chromium
from tests.stack import free_ports, running, until

# Page: what needs the API on it.
PAGES = {
    "Overview": ".tile",
    "Jobs": "tbody tr",
    "Data sets": "[data-testid=stFileUploader]",
    "Adapters": "[data-testid=stFileUploader]",
    "Playground": "[data-testid=stChatInput]",
    "Targets": ".tile",
    "Alerts": "tbody tr",
    "Memory": ".tile",
    "Engine": ".tile",
    "Tenants": "tbody tr",
    "Audit": "[data-testid=stTextInput]",
}
_PATHS = {"Overview": "", "Data sets": "datasets"}
_ALONE = """import streamlit as st
def one(): st.title("One")
def two(): st.title("Two")
st.navigation([st.Page(one, title="One", default=True), st.Page(two, title="Two")]).run()
"""
# The ms, on the page's own clock, at which the heading and the content were first seen; null while they are not.
# Tables and tiles lie in shadow roots.
_SEEN = """({title, selector}) => {
  const visible = (node) => { const box = node.getBoundingClientRect(); return box.width > 0 && box.height > 0; };
  const heading = [...document.querySelectorAll("h1")].find((node) => node.textContent.trim() === title);
  if (!heading || !visible(heading)) return null;
  window.headingAt ||= performance.now();
  const hosts = document.querySelectorAll("[data-testid^=stBidiComponent]");
  const roots = [document, ...[...hosts].flatMap((host) => [host, ...host.children]).map((node) => node.shadowRoot)];
  const found = roots.some((root) => root && [...root.querySelectorAll(selector)].some(visible));
  return found ? [window.headingAt, performance.now()] : null;
}"""
_PRESS = "(link) => { window.headingAt = 0; link.click(); return performance.now(); }"
_SAYS = "(text) => document.body.innerText.includes(text)"
_SETTLE_MS = 500


def fill(url: str, jobs: int) -> None:
    """Jobs that have ended, newest last, each with its events."""
    store = Store(url)
    time_ = now() - timedelta(days=30)
    step = timedelta(days=30) / jobs
    states = ("succeeded", "succeeded", "succeeded", "failed", "cancelled")
    spec = {"dataset": "rivers", "adapter_name": "sailor", "micro_batch_tokens": 256, "sequence_length": 256}
    with store.write() as session:
        for number in range(jobs):
            began = time_ + step * number
            job_id = f"job-{number:012x}"
            session.add(
                JobRecord(
                    id=job_id, name=f"run {number}", state=states[number % len(states)], spec=spec, tenant="default",
                    dataset_id="ds-1", dataset_name="rivers", adapter_name=f"sailor-{number % 50}", adapter_version=1,
                    created_at=began, started_at=began, ended_at=began + step, state_since=began, priority=0, step=100,
                    total_steps=100, loss=1.5, first_loss=3.0, tokens=25_600, resumes=0, stalls=0, start_step=0,
                )
            )  # fmt: skip
        session.flush()
        session.add_all(
            JobEventRecord(job_id=f"job-{number:012x}", time=time_, kind=kind, message="")
            for number in range(jobs)
            for kind in ("submitted", "running", "ended")
        )
    store.close()


def seen(page: Page, title: str, selector: str) -> tuple[float, float]:
    """Waits for heading and content; ms on the page's clock at which each was there."""
    heading, content = page.wait_for_function(
        _SEEN, arg={"title": title, "selector": selector}, polling="raf"
    ).json_value()
    return heading, content


def opened(page: Page, address: str, title: str, selector: str) -> tuple[float, float]:
    """ms from the request for an address to the page's heading and to its content."""
    page.goto(address, wait_until="commit")
    return seen(page, title, selector)


def switched(page: Page, title: str, selector: str) -> float:
    """ms from a press of the page's link in the navigation to its content."""
    link = page.get_by_test_id("stSidebarNav").get_by_role("link", name=title, exact=True)
    began: float = link.evaluate(_PRESS)
    return seen(page, title, selector)[1] - began


def of_page(page: Page, address: str, title: str, selector: str, other: str, rounds: int) -> dict[str, int]:
    """The figures of one page; `other` is the page from which it is switched to."""
    opens, switches = [], []
    for _ in range(rounds):
        opens.append(opened(page, address, title, selector))
        page.wait_for_timeout(_SETTLE_MS)
        switched(page, other, "h1")
        page.wait_for_timeout(_SETTLE_MS)
        switches.append(switched(page, title, selector))
        page.wait_for_timeout(_SETTLE_MS)
    return {
        "opened_heading_ms": round(median(heading for heading, _ in opens)),
        "opened_content_ms": round(median(content for _, content in opens)),
        "opened_slowest_ms": round(max(content for _, content in opens)),
        "switched_content_ms": round(median(switches)),
        "switched_slowest_ms": round(max(switches)),
    }


def obeyed(page: Page, console_url: str, client: Client, rounds: int) -> list[int]:
    """ms from the press of Apply on the Targets page until it says that the engine has taken the target up."""
    opened(page, f"{console_url}/targets", "Targets", PAGES["Targets"])
    taken = []
    for number in range(rounds):
        version = client.targets().version + 1
        field = page.get_by_label("ITL target, ms")
        field.fill(str(100 + number))
        field.press("Tab")
        page.wait_for_timeout(_SETTLE_MS)
        began = time.perf_counter()
        page.get_by_role("button", name="Apply").click()
        page.wait_for_function(_SAYS, arg=f"version {version} in force in the engine", polling="raf")
        taken.append(round((time.perf_counter() - began) * 1e3))
    return taken


def measure(
    console_url: str, alone_url: str, client: Client, rounds: int
) -> tuple[dict[str, dict[str, int]], list[int]]:
    """Figures by page, those of Streamlit alone first; and those of `obeyed`."""
    found = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        opened(page, alone_url, "One", "h1")
        opened(page, console_url, "Overview", PAGES["Overview"])
        found["Streamlit alone"] = of_page(page, f"{alone_url}/two", "Two", "h1", "One", rounds)
        for title, selector in PAGES.items():
            address = f"{console_url}/{_PATHS.get(title, title.lower())}"
            other = "Audit" if title != "Audit" else "Tenants"
            found[title] = of_page(page, address, title, selector, other, rounds)
            print(f"{title:15} {found[title]}", flush=True)
        taken = obeyed(page, console_url, client, rounds)
        browser.close()
    return found, taken


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--jobs", type=int, default=10_000)
    arguments.add_argument("--rounds", type=int, default=5)
    given = arguments.parse_args()
    model = model_folder.ensure(Settings(data_dir=ROOT / ".cache"))
    with tempfile.TemporaryDirectory() as folder:
        data, beside, apart = (Path(folder) / name for name in ("data", "console", "alone"))
        for place in (data, beside, apart):
            place.mkdir()
        (apart / "app.py").write_text(_ALONE)
        # As the console is configured, but for its colours.
        options = ["--server.headless=true", "--server.fileWatcherType=none", "--browser.gatherUsageStats=false"]
        api, engine, port, other = free_ports(4)
        address = ["--server.address=127.0.0.1", f"--server.port={other}"]
        settings = Settings(
            data_dir=data, api_port=api, engine_port=engine, console_port=port, engine=EngineSettings(model=model)
        )
        fill(settings.resolved_database_url, given.jobs)
        os.environ["HARLI_DATA_DIR"] = str(data)
        reader = Client(settings.api_url, token=settings.token_file)
        with (
            running(settings, "core.api"),
            console(settings, beside),
            running(settings, "streamlit", "run", "app.py", *address, *options, folder=apart),
            reader as client,
        ):
            until(lambda: answers(client), 60, "the API")
            until(lambda: listens(other), 60, "Streamlit alone")
            with Peer(settings.resolved_link_url, model, settings.engine_url):
                until(lambda: client.live().now is not None, 60, "the first figures")
                load = os.getloadavg()[0]
                pages, taken = measure(settings.console_url, f"http://127.0.0.1:{other}", client, given.rounds)
    alone = pages.pop("Streamlit alone")
    slowest = max(page["opened_content_ms"] for page in pages.values())
    print(f"slowest median to content: {slowest} ms with {given.jobs} jobs; load before {load:.1f}")
    print(f"Streamlit alone: {alone}")
    print(f"a changed target is in force after {median(taken):.0f} ms, at most {max(taken)}")
    body = {
        "provenance": record.provenance("streamlit", "playwright"), "jobs": given.jobs, "rounds": given.rounds,
        "load_before": round(load, 1), "streamlit_alone": alone, "pages": pages,
        "target_in_force_ms": taken,
    }  # fmt: skip
    print(record.write("console", body))


if __name__ == "__main__":
    main()
