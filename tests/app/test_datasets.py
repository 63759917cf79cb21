"""Data sets: upload with its check, rows and the packed batch, download, delete."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from zoneinfo import ZoneInfo

import pyarrow.parquet as pq
import pytest
from playwright.sync_api import Page, expect

from core.api.schemas import Dataset
from tests.app.browser import NewPage, entry, tile, visit
from tests.app.conftest import Backstage, rows

pytestmark = pytest.mark.browser

MakeDataset = Callable[[str], Dataset]


def offer(page: Page, backstage: Backstage, filename: str, content: bytes) -> None:
    """Hand a file to the upload form."""
    visit(page, f"{backstage.url}/datasets", "Data sets")
    page.set_input_files(
        "input[type=file]", files=[{"name": filename, "mimeType": "application/octet-stream", "buffer": content}]
    )


def names(backstage: Backstage) -> list[str]:
    return [f"{dataset.name}@{dataset.version}" for dataset in backstage.client.datasets().items]


def test_a_file_becomes_a_data_set_with_report_rows_and_packed_batch(page: Page, backstage: Backstage) -> None:
    offer(page, backstage, "Good Rows.jsonl", rows(72))
    expect(entry(page, "Name")).to_have_value("good-rows")
    expect(page.get_by_text("read as prompt/completion")).to_be_visible()
    page.get_by_role("button", name="Upload and check").click()
    expect(page.get_by_role("heading", level=1, name="good-rows", exact=True)).to_be_visible()
    expect(tile(page, "Rows").locator(".value")).to_have_text("72")
    expect(tile(page, "Tokens").locator(".value")).to_have_text(re.compile(r"^\d,\d{3}$"))
    page.get_by_role("tab", name="Rows").click()
    expect(page.get_by_text("Aye, 3 and 3 be 6.")).to_be_visible()
    page.get_by_text("As the model sees them").click()
    expect(page.locator("[data-rendered] span.on").first).to_be_visible()
    assert "Aye" in "".join(page.locator("[data-rendered] span.on").all_inner_texts())
    page.get_by_role("tab", name="Packed batch").click()
    packed = page.locator("[data-packed]")
    expect(packed).to_contain_text("assistant")
    counted = "".join(packed.locator("span.on").all_inner_texts())
    assert "Aye" in counted
    assert "What is" not in counted
    colours = packed.locator("span").evaluate_all("spans => new Set(spans.map(span => span.style.background)).size")
    assert colours == backstage.client.dataset_packed("good-rows").segments > 1


def test_another_file_takes_its_own_name(page: Page, backstage: Backstage) -> None:
    offer(page, backstage, "first-choice.jsonl", rows(3))
    expect(entry(page, "Name")).to_have_value("first-choice")
    page.set_input_files(
        "input[type=file]", files=[{"name": "second.jsonl", "mimeType": "text/plain", "buffer": rows(4)}]
    )
    expect(entry(page, "Name")).to_have_value("second")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b'{"prompt": "Who?", "completion": "Me."}\n{"prompt": \n', "2"),
        (b'{"question": "Who?", "weight": 3}\n', "weight"),
    ],
    ids=["empty", "broken line", "no answer"],
)
def test_a_file_that_cannot_be_used_is_refused_with_the_place(
    page: Page, backstage: Backstage, content: bytes, said: str
) -> None:
    before = names(backstage)
    offer(page, backstage, "bad-rows.jsonl", content)
    page.get_by_role("button", name="Upload and check").click()
    alert = page.get_by_test_id("stAlert").first
    expect(alert).to_contain_text("Uploading bad-rows.jsonl failed.")
    expect(page.get_by_test_id("stMain")).to_contain_text(said)
    expect(alert.locator("code").first).to_have_text(re.compile("^[a-z_]+$"))
    assert names(backstage) == before


def test_a_taken_name_is_said_before_the_upload_and_can_become_a_version(
    page: Page, backstage: Backstage, make_dataset: MakeDataset
) -> None:
    make_dataset("taken-rows")
    offer(page, backstage, "taken-rows.jsonl", rows(30))
    expect(page.get_by_test_id("stAlert")).to_contain_text("taken-rows")
    button = page.get_by_role("button", name="Upload and check")
    expect(button).to_be_disabled()
    page.get_by_text("Store it as a new version of that data set").click()
    expect(button).to_be_enabled()
    button.click()
    expect(page.get_by_text("Version 2")).to_be_visible()
    assert "taken-rows@2" in names(backstage)


def test_a_name_that_cannot_be_one_is_said_before_the_upload(page: Page, backstage: Backstage) -> None:
    offer(page, backstage, "rows.jsonl", rows(30))
    entry(page, "Name").fill("My Rows")
    expect(page.get_by_test_id("stAlert")).to_contain_text("'My Rows' cannot be a name")
    expect(page.get_by_role("button", name="Upload and check")).to_be_disabled()


def test_columns_with_other_names_can_be_mapped(page: Page, backstage: Backstage) -> None:
    content = b"".join(b'{"frage": "Wer %d?", "reaktion": "Ich %d."}\n' % (n, n) for n in range(30))
    offer(page, backstage, "mapped-rows.jsonl", content)
    expect(page.get_by_text("none of its columns has a usual name")).to_be_visible()
    for role, column in (("prompt", "frage"), ("completion", "reaktion")):
        page.get_by_role("combobox", name=f"Column of the {role}").click()
        page.get_by_role("option", name=re.compile(f"^{column} ")).click()
    expect(page.get_by_text("Wer 0?")).to_be_visible()
    page.get_by_role("button", name="Upload and check").click()
    expect(page.get_by_role("heading", level=1, name="mapped-rows", exact=True)).to_be_visible()
    expect(page.get_by_text("frage")).to_be_visible()


def test_what_the_report_will_remark_is_told_before_the_upload(page: Page, backstage: Backstage) -> None:
    offer(page, backstage, "twice-rows.jsonl", rows(20) + rows(2))
    shown = page.get_by_test_id("stMain")
    expect(shown).to_contain_text("2 × Same as an earlier row.")
    expect(shown).to_contain_text("line 21: as line 1")
    expect(shown).to_contain_text("Of its 22 rows, by language: en 22")
    offer(page, backstage, "many-rows.jsonl", rows(700))
    expect(shown).to_contain_text("Of the first 500 rows, by language: en 500")


def test_two_quick_presses_upload_once(page: Page, backstage: Backstage) -> None:
    offer(page, backstage, "once-rows.jsonl", rows(30))
    page.get_by_role("button", name="Upload and check").dblclick()
    expect(page.get_by_role("heading", level=1, name="once-rows", exact=True)).to_be_visible()
    page.wait_for_timeout(1500)
    expect(page.get_by_test_id("stAlert").filter(has_text="failed")).to_have_count(0)
    assert [name for name in names(backstage) if name.startswith("once-rows@")] == ["once-rows@1"]


def test_the_limit_and_the_way_for_larger_files_are_stated(page: Page, backstage: Backstage) -> None:
    visit(page, f"{backstage.url}/datasets", "Data sets")
    expect(page.get_by_text("up to 200 MiB from the browser")).to_be_visible()
    expect(page.get_by_text("up to 1,024 MiB, go by the command line or HTTP")).to_be_visible()
    page.get_by_text("From a shell or over HTTP").click()
    expect(page.get_by_text("harli datasets upload").first).to_be_visible()


def test_the_normalised_file_can_be_downloaded(
    page: Page, backstage: Backstage, make_dataset: MakeDataset, tmp_path: Path
) -> None:
    dataset = make_dataset("fetched-rows")
    visit(page, f"{backstage.url}/datasets?dataset={dataset.id}", "fetched-rows")
    with page.expect_download() as started:
        page.get_by_role("button", name="Download Parquet").click()
    path = tmp_path / "fetched.parquet"
    started.value.save_as(path)
    assert started.value.suggested_filename == "fetched-rows-v1.parquet"
    assert pq.read_table(path).num_rows == 40


@pytest.mark.parametrize("zone", ["Asia/Tokyo", "America/New_York"])
def test_times_are_in_the_viewers_zone(
    new_page: NewPage, backstage: Backstage, make_dataset: MakeDataset, zone: str
) -> None:
    name = f"times-{zone.split('/')[1].lower().replace('_', '-')}"
    dataset = make_dataset(name)
    page = new_page(zone=zone)
    visit(page, f"{backstage.url}/datasets?dataset={dataset.id}", name)
    expect(page.get_by_text(f"{dataset.created_at.astimezone(ZoneInfo(zone)):%H:%M:%S}")).to_be_visible()


def test_deleting_is_confirmed_and_refused_while_a_job_needs_it(
    page: Page, quiet: Backstage, make_dataset: MakeDataset
) -> None:
    dataset = make_dataset("doomed-rows")
    job = quiet.client.submit_job(dataset="doomed-rows", adapter_name="doomed-adapter")
    visit(page, f"{quiet.url}/datasets?dataset={dataset.id}", "doomed-rows")
    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_role("button", name="Delete it").click()
    expect(page.get_by_test_id("stAlert").first).to_contain_text(job.id)
    assert "doomed-rows@1" in names(quiet)
    quiet.client.stop_job(job.id)
    page.reload()
    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_role("button", name="Delete it").click()
    expect(page.get_by_role("heading", level=1, name="Data sets", exact=True)).to_be_visible()
    assert "doomed-rows@1" not in names(quiet)


def test_a_data_set_leads_to_the_form(page: Page, backstage: Backstage, make_dataset: MakeDataset) -> None:
    dataset = make_dataset("next-rows")
    visit(page, f"{backstage.url}/datasets?dataset={dataset.id}", "next-rows")
    page.get_by_role("link", name="Train on it").click()
    expect(page.get_by_role("combobox", name="Data set")).to_have_value("next-rows")
