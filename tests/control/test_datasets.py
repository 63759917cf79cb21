"""Data sets in the store: versions, names, who reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from core.api import schemas
from core.control import datasets, jobs
from core.control.context import Control
from core.errors import Conflict, Invalid, NotFound, Unavailable
from tests.control import files
from tests.machine import ROOT

Submit = Callable[..., schemas.Job]


def again(control: Control, tmp_path: Path, new_version: bool) -> schemas.Dataset:
    path = files.jsonl(tmp_path / "again.jsonl", rows=3)
    return datasets.store(control, path, path.name, "0" * 64, "rivers", None, new_version)[0]


def test_an_upload_is_checked_and_stored_with_its_report(control: Control, dataset: schemas.Dataset) -> None:
    assert (dataset.name, dataset.version, dataset.report.rows) == ("rivers", 1, 8)
    assert datasets.get(control, "rivers") == datasets.get(control, dataset.id) == dataset
    assert control.dataset_file(dataset.id).is_file()
    rows = datasets.read_rows(control, "rivers", 6, 10)
    assert [row.index for row in rows] == [6, 7]
    assert rows[0].messages[0].content == "Where does river 6 go?"


def test_a_name_is_its_newest_version_an_id_stays_what_it_was(
    control: Control, dataset: schemas.Dataset, tmp_path: Path
) -> None:
    second = again(control, tmp_path, True)
    assert second.version == 2
    assert datasets.get(control, "rivers").id == second.id
    assert datasets.get(control, dataset.id).version == 1
    assert [found.version for found in datasets.page(control, 10, None).items] == [2, 1]


def test_the_same_rows_make_no_new_version_whatever_the_file(
    control: Control, dataset: schemas.Dataset, tmp_path: Path
) -> None:
    path = tmp_path / "rivers.jsonl"
    path.write_text("\n" + path.read_text())
    assert datasets.store(control, path, "other.jsonl", "1" * 64, "rivers", None, True) == (dataset, False)
    assert len(list((control.data_dir / "datasets").iterdir())) == 1
    again(control, tmp_path, True)
    assert datasets.store(control, path, "other.jsonl", "1" * 64, "rivers", None, True)[0].version == 1


def test_a_look_holds_rows_against_the_template_of_the_model_that_will_take_them(
    control: Control, small_tokenizer: Path
) -> None:
    tools = ROOT / "sample_data" / "odd" / "tools_openai.jsonl"
    assert datasets.look(control, tools, tools.name, None, partial=False).faults == []
    control.settings.engine.model = small_tokenizer
    faults = datasets.look(control, tools, tools.name, None, partial=False).faults
    assert len(faults) == 2 and all("does not write calls of tools" in fault for fault in faults)


def test_rows_of_another_models_tokens_are_a_version(
    control: Control, dataset: schemas.Dataset, tmp_path: Path, small_tokenizer: Path
) -> None:
    control.settings.engine.model = small_tokenizer
    path = tmp_path / "rivers.jsonl"
    found, is_new = datasets.store(control, path, path.name, "0" * 64, "rivers", None, True)
    assert (found.version, is_new) == (2, True)
    assert datasets.rendered(control, found.id, 6, 10)[0].index == 6
    text = "".join(token.text for token in datasets.rendered(control, found.id, 0, 1)[0].tokens if token.trained)
    assert text == "down down down down to sea 0.<|im_end|>"


def test_a_taken_name_is_found_out_before_and_at_the_upload(
    control: Control, dataset: schemas.Dataset, tmp_path: Path
) -> None:
    assert not datasets.check_name(control, dataset.name).available
    assert datasets.check_name(control, "lakes").available
    for ask in (lambda: datasets.require_name(control, "rivers", False), lambda: again(control, tmp_path, False)):
        with pytest.raises(Conflict, match="rivers already"):
            ask()
    assert [path.name for path in (control.data_dir / "datasets").iterdir()] == [f"{dataset.id}.parquet"]


def test_a_file_that_cannot_be_trained_on_leaves_nothing_and_says_what_is_wrong(
    control: Control, tmp_path: Path
) -> None:
    path = tmp_path / "broken.jsonl"
    files.jsonl(path, rows=1)
    with path.open("a") as file:
        file.write('{"mess\n')
    with pytest.raises(Invalid, match="2") as caught:
        datasets.store(control, path, path.name, "0" * 64, "broken", None, False)
    assert caught.value.report.rows_read >= 1
    assert datasets.page(control, 10, None).items == []
    assert list((control.data_dir / "datasets").iterdir()) == []


def test_what_a_job_reads_is_not_deleted_under_it(
    control: Control, dataset: schemas.Dataset, submit: Submit, tmp_path: Path
) -> None:
    second = again(control, tmp_path, True)
    job = submit()
    assert job.dataset_id == second.id
    for name in ("rivers", second.id):
        with pytest.raises(Conflict, match=job.id):
            datasets.delete(control, name)
    datasets.delete(control, dataset.id)
    jobs.stop(control, job.id, save=False)
    datasets.delete(control, "rivers")
    assert list((control.data_dir / "datasets").iterdir()) == []
    assert datasets.check_name(control, "rivers").available
    assert jobs.get(control, job.id).dataset_name == "rivers", "the job still says what it would have read"


def test_the_packed_preview_needs_a_tokenizer(
    control: Control, dataset: schemas.Dataset, small_tokenizer: Path
) -> None:
    with pytest.raises(Unavailable, match="tokenizer"):
        datasets.packed(control, dataset.name, None, None, 0)
    control.settings.engine.model = small_tokenizer
    preview = datasets.packed(control, dataset.name, 64, None, 0)
    assert preview.micro_batch_tokens == 64
    assert sum(token.trained for token in preview.tokens) == preview.trained_tokens > 0


def test_a_data_set_that_does_not_exist_is_not_found(control: Control) -> None:
    for ask in (datasets.get, datasets.delete, datasets.file):
        with pytest.raises(NotFound, match="lakes"):
            ask(control, "lakes")
