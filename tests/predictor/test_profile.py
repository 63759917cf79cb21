"""Profiles as files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from core.errors import Invalid, NotFound
from core.predictor.profile import cache_key, read_profile, write_profile
from tests.predictor.synthetic import MACHINE, profile


def test_a_profile_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = write_profile(profile(), tmp_path / "profiles")
    assert path.name == f"{cache_key(MACHINE)}.json"
    assert read_profile(path, MACHINE) == profile()
    assert list(path.parent.iterdir()) == [path]


def test_anything_that_changes_durations_changes_the_key() -> None:
    keys = {cache_key(MACHINE)}
    for field, value in {"gpu": "A100", "driver": "1", "model": "x", "engine": "y", "dtype": "z", "sms": 108}.items():
        keys.add(cache_key(MACHINE.model_copy(update={field: value})))
    assert len(keys) == 7


def test_the_profile_of_another_gpu_is_refused_with_what_differs(tmp_path: Path) -> None:
    path = write_profile(profile(), tmp_path)
    with pytest.raises(Invalid, match=r"gpu is 'H200' there and 'A100' here.*harli profile"):
        read_profile(path, MACHINE.model_copy(update={"gpu": "A100"}))


def test_a_missing_file_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="harli profile"):
        read_profile(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda body: body["points"][3].update(ms=-1.0), r"points\.3\.ms"),
        (lambda body: body["points"][0].update(layout=["half", 1, 2]), r"points\.0\.layout"),
        (lambda body: body.pop("machine"), "machine"),
        (lambda body: body.update(points=[p for p in body["points"] if p["layout"][0] != "whole"]), "whole"),
    ],
)
def test_a_broken_profile_names_file_and_field(tmp_path: Path, change: object, word: str) -> None:
    path = write_profile(profile(), tmp_path)
    body = json.loads(path.read_text())
    change(body)  # type: ignore[operator]
    path.write_text(json.dumps(body))
    with pytest.raises(Invalid, match=word) as found:
        read_profile(path)
    assert str(path) in found.value.message


def test_a_file_that_is_no_json_is_an_error_too(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text("no")
    with pytest.raises(Invalid, match="Invalid JSON"):
        read_profile(path)
