"""How long each page of the console takes to its first content, with 10,000 jobs in the store.

``python -m benchmarks.console``: API and console as processes, the tests' peer in the engine's place (it reports
figures and trains on paper, so that the page is what is measured and not a model), Chromium on the same machine. A page
is opened by its address and by the navigation, several times; content is its heading and the first row, tile or field
that needs the API.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from playwright.sync_api import Page, expect, sync_playwright

from benchmarks import record
from core.client import Client
from core.config import EngineSettings, Settings
from core.serving import model_folder
from db.base import now
from db.jobs import JobEventRecord, JobRecord
from db.store import Store
from tests.app.conftest import answers, console
from tests.app.peer import Peer
from tests.machine import ROOT, chromium
from tests.stack import free_ports, running, until

# Page: what needs the API on it.
PAGES = {
    "Overview": ".tile >> nth=0",
    "Jobs": "tbody tr >> nth=0",
    "Data sets": "[data-testid=stFileUploader]",
    "Adapters": "[data-testid=stFileUploader]",
    "Playground": "[data-testid=stChatInput]",
    "Targets": ".tile >> nth=0",
    "Alerts": "tbody tr >> nth=0",
    "Engine": ".tile >> nth=0",
    "Tenants": "[data-testid=stMain] h1",
    "Audit": "[data-testid=stMain] h1",
}
_PATHS = {"Overview": "", "Data sets": "datasets"}


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


def timed(act: Callable[[], object], page: Page, title: str, selector: str) -> tuple[float, float]:
    """ms to the heading, and to the content."""
    began = time.perf_counter()
    act()
    expect(page.get_by_role("heading", level=1, name=title)).to_be_visible()
    heading = time.perf_counter()
    expect(page.locator(selector)).to_be_visible()
    return (heading - began) * 1e3, (time.perf_counter() - began) * 1e3


def measure(url: str, rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    expect.set_options(timeout=30_000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(url)
        expect(page.locator(".tile >> nth=0")).to_be_visible()
        for title, selector in PAGES.items():
            address = f"{url}/{_PATHS.get(title, title.lower())}"
            link = page.get_by_test_id("stSidebarNav").get_by_role("link", name=title, exact=True)
            opened, switched = [], []
            for _ in range(rounds):
                opened.append(timed(lambda at=address: page.goto(at), page, title, selector))
                other = "Audit" if title != "Audit" else "Tenants"
                page.get_by_test_id("stSidebarNav").get_by_role("link", name=other, exact=True).click()
                expect(page.get_by_role("heading", level=1, name=other)).to_be_visible()
                switched.append(timed(link.click, page, title, selector))
            found[title] = {
                "opened_heading_ms": round(median(heading for heading, _ in opened)),
                "opened_content_ms": round(median(content for _, content in opened)),
                "opened_slowest_ms": round(max(content for _, content in opened)),
                "switched_content_ms": round(median(content for _, content in switched)),
                "switched_slowest_ms": round(max(content for _, content in switched)),
            }
            print(f"{title:11} {found[title]}", flush=True)
        browser.close()
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--jobs", type=int, default=10_000)
    arguments.add_argument("--rounds", type=int, default=5)
    given = arguments.parse_args()
    model = model_folder.ensure(Settings(data_dir=ROOT / ".cache"))
    with tempfile.TemporaryDirectory() as folder:
        data, beside = Path(folder) / "data", Path(folder) / "console"
        data.mkdir()
        beside.mkdir()
        api, engine, port = free_ports(3)
        settings = Settings(
            data_dir=data, api_port=api, engine_port=engine, console_port=port, engine=EngineSettings(model=model)
        )
        fill(settings.resolved_database_url, given.jobs)
        os.environ["HARLI_DATA_DIR"] = str(data)
        reader = Client(settings.api_url, token=settings.token_file)
        with running(settings, "core.api"), console(settings, beside), reader as client:
            until(lambda: answers(client), 60, "the API")
            with Peer(settings.resolved_link_url, model, settings.engine_url):
                until(lambda: client.live().now is not None, 60, "the first figures")
                load = os.getloadavg()[0]
                pages = measure(settings.console_url, given.rounds)
    slowest = max(page["opened_content_ms"] for page in pages.values())
    print(f"slowest median to content: {slowest} ms with {given.jobs} jobs; load before {load:.1f}")
    body = {
        "provenance": record.provenance("streamlit", "playwright"), "jobs": given.jobs, "rounds": given.rounds,
        "load_before": round(load, 1), "pages": pages,
    }  # fmt: skip
    print(record.write("console", body))


if __name__ == "__main__":
    main()
