"""Adapters in the store: versions, names, who needs them."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from core.api import schemas
from core.control import adapters, jobs
from core.control.context import Control
from core.errors import Conflict, HarliError, NotFound
from tests.control import files

Submit = Callable[..., schemas.Job]


def upload(control: Control, tmp_path: Path, name: str = "captain", new_version: bool = False) -> schemas.Adapter:
    return adapters.upload(control, files.adapter(tmp_path / "folder"), name, new_version)


def test_uploads_of_one_name_are_versions(control: Control, tmp_path: Path) -> None:
    first = upload(control, tmp_path)
    assert (first.name, [v.version for v in first.versions], first.deployment) == ("captain", [1], "none")
    second = upload(control, tmp_path, new_version=True)
    assert [v.version for v in second.versions] == [1, 2]
    assert all(control.adapter_folder("captain", number).is_dir() for number in (1, 2))
    version = second.versions[0]
    assert (version.origin, version.rank, version.alpha) == ("imported", 8, 16.0)
    assert sorted(version.target_modules) == ["q_proj", "v_proj"]


def test_a_taken_name_is_found_out_before_and_at_the_upload(control: Control, tmp_path: Path) -> None:
    assert adapters.check_name(control, "captain").available
    upload(control, tmp_path)
    check = adapters.check_name(control, "captain")
    assert not check.available
    assert "captain already" in (check.reason or "")
    with pytest.raises(Conflict, match="captain already"):
        adapters.require_name(control, "captain", False)
    with pytest.raises(Conflict, match="captain already"):
        upload(control, tmp_path)
    adapters.require_name(control, "captain", True)


def test_a_refused_upload_leaves_nothing(control: Control, tmp_path: Path) -> None:
    broken = files.adapter(tmp_path / "broken")
    (broken / "adapter_model.safetensors").write_bytes(b"\0" * 64)
    (broken / "adapter_config.json").write_text("{")
    with pytest.raises((HarliError, ValueError)):
        adapters.upload(control, broken, "broken", False)
    assert list(control.uploads.iterdir()) == []
    assert adapters.page(control, 10, None).items == []
    assert not (control.data_dir / "adapters" / "broken").exists()


def test_pages_are_by_name(control: Control, tmp_path: Path) -> None:
    for name in ("c", "a", "b"):
        upload(control, tmp_path, name)
    first = adapters.page(control, 2, None)
    assert [adapter.name for adapter in first.items] == ["a", "b"]
    assert [adapter.name for adapter in adapters.page(control, 2, first.next).items] == ["c"]


def test_a_version_is_downloaded_as_a_zip_of_its_folder(control: Control, tmp_path: Path) -> None:
    upload(control, tmp_path)
    path, filename = adapters.archive(control, "captain", None)
    assert filename == "captain-1.zip"
    with zipfile.ZipFile(path) as archive:
        assert "adapter_model.safetensors" in archive.namelist()
        assert archive.testzip() is None


def test_what_a_job_starts_from_or_writes_is_not_deleted_under_it(
    control: Control, tmp_path: Path, submit: Submit
) -> None:
    upload(control, tmp_path)
    upload(control, tmp_path, new_version=True)
    job = submit("mate", initial_adapter="captain@1")
    for version in (1, None):
        with pytest.raises(Conflict, match=job.id):
            adapters.delete(control, "captain", version)
    adapters.delete(control, "captain", 2)
    jobs.stop(control, job.id, save=False)
    writer = submit("captain")
    with pytest.raises(Conflict, match=writer.id):
        adapters.delete(control, "captain", None)
    jobs.stop(control, writer.id, save=False)
    adapters.delete(control, "captain", None)
    assert not control.adapter_folder("captain", 1).exists()


@pytest.mark.parametrize(
    "ask",
    [
        lambda control: adapters.get(control, "nobody"),
        lambda control: adapters.deploy(control, "nobody", None),
        lambda control: adapters.undeploy(control, "nobody"),
        lambda control: adapters.delete(control, "nobody", None),
        lambda control: adapters.archive(control, "nobody", None),
    ],
)
def test_an_adapter_that_does_not_exist_is_not_found(control: Control, ask: Callable[[Control], object]) -> None:
    with pytest.raises(NotFound, match="nobody"):
        ask(control)


def test_a_version_that_does_not_exist_is_named_with_those_that_do(control: Control, tmp_path: Path) -> None:
    upload(control, tmp_path)
    with pytest.raises(NotFound, match="no version 7; there are: 1"):
        adapters.deploy(control, "captain", 7)
