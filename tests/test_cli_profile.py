"""Facts about `harli profile`: what was measured is shown, and can be had measured again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from core.cli import app
from core.predictor.profile import Profile, write_profile
from core.runtime.profiles import PROFILES
from tests.predictor.synthetic import MACHINE, profile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_profile(profile(), tmp_path / PROFILES)


def harli(data_dir: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["profile", *arguments], env={"HARLI_DATA_DIR": str(data_dir)})


def test_show_tells_the_machine_and_what_was_measured(tmp_path: Path, path: Path) -> None:
    said = harli(tmp_path, "show")
    assert said.exit_code == 0
    assert str(path) in said.stdout and MACHINE.gpu in said.stdout and "split(64, 68)" in said.stdout


def test_show_gives_programs_the_whole_profile(tmp_path: Path, path: Path) -> None:
    (found,) = json.loads(harli(tmp_path, "show", "--json").stdout)
    assert Profile.model_validate(found) == profile()
    assert len(json.loads(harli(tmp_path, "show", str(path), "--json").stdout)) == 1


def test_without_a_command_the_profiles_are_removed_and_the_next_start_takes_new_ones(
    tmp_path: Path, path: Path
) -> None:
    path.with_suffix(".attempt").touch()
    said = harli(tmp_path)
    assert said.exit_code == 0
    assert f"removed {path}" in said.stdout and "next start" in said.stdout
    assert not list(path.parent.iterdir())


def test_a_machine_without_one_is_told_when_it_gets_one(tmp_path: Path) -> None:
    assert "at its first start" in harli(tmp_path, "show").stdout
    assert json.loads(harli(tmp_path, "show", "--json").stdout) == []


def test_a_file_that_is_no_profile_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    said = harli(tmp_path, "show", str(bad))
    assert said.exit_code == 1
    assert "harli profile" in said.stderr and "bad_profile" in said.stderr
