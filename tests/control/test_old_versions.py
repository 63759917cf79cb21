"""Old versions go by themselves, those that are needed stay."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from core.api import schemas
from core.config import RetentionSettings
from core.control import adapters, aliases, datasets, old_versions
from core.control.context import Control
from db.adapters import AdapterVersionRecord
from db.base import now
from db.datasets import DatasetRecord
from tests.control import files


@pytest.fixture
def captain(control: Control, tmp_path: Path) -> None:
    """An adapter of six versions, old but for the last."""
    for number in range(6):
        adapters.upload(control, files.adapter(tmp_path / f"captain-{number}"), "captain", new_version=number > 0)
    age(control, AdapterVersionRecord)


def age(control: Control, kind: type[AdapterVersionRecord] | type[DatasetRecord]) -> None:
    with control.store.write() as session:
        for record in session.query(kind):
            record.created_at = now() - timedelta(days=40)


def versions(control: Control) -> list[int]:
    return [version.version for version in adapters.get(control, "captain").versions]


def retire(control: Control, **settings: object) -> None:
    control.settings.retention = RetentionSettings.model_validate(settings)
    old_versions.retire(control, control.store.write)


def test_nothing_goes_unless_the_settings_say_so(control: Control, captain: None) -> None:
    retire(control)
    assert versions(control) == [1, 2, 3, 4, 5, 6]
    retire(control, adapter_versions=1, days=50)
    assert versions(control) == [1, 2, 3, 4, 5, 6], "young enough"


def test_what_is_served_named_or_started_from_stays(
    control: Control, captain: None, submit: Callable[..., schemas.Job]
) -> None:
    adapters.deploy(control, "captain", 1)
    aliases.promote(control, "captain", "prod", 2)
    submit("mate", initial_adapter="captain@3")
    retire(control, adapter_versions=1)
    assert versions(control) == [1, 2, 3, 6]
    assert not control.adapter_folder("captain", 4).exists()
    assert control.adapter_folder("captain", 3).is_dir()


def test_data_sets_that_jobs_read_stay(control: Control, tmp_path: Path, submit: Callable[..., schemas.Job]) -> None:
    job = submit()
    for rows in (3, 4, 5):
        path = files.jsonl(tmp_path / "more.jsonl", rows=rows)
        datasets.store(control, path, path.name, "0" * 64, "rivers", None, True)
    age(control, DatasetRecord)
    retire(control, dataset_versions=1)
    assert {found.version for found in datasets.page(control, 10, None).items} == {1, 4}
    assert datasets.get(control, job.dataset_id).version == 1
    assert len(list((control.data_dir / "datasets").iterdir())) == 2
