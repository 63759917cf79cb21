"""Facts about pages whose figures a program writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.page import fill, shown
from benchmarks.record import command


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text("It takes <!-- ms -->5 ms<!-- /ms --> today.\n\n<!-- rows -->\n<!-- /rows -->\n\nThe end.\n")
    return path


def test_a_figure_goes_between_its_marks_in_a_sentence_or_on_lines_of_its_own(page: Path) -> None:
    fill(page, {"ms": "6 ms", "rows": "| a |\n| b |"})
    assert page.read_text() == (
        "It takes <!-- ms -->6 ms<!-- /ms --> today.\n\n<!-- rows -->\n| a |\n| b |\n<!-- /rows -->\n\nThe end.\n"
    )
    assert shown(page, "ms") == "6 ms"
    assert shown(page, "rows") == "| a |\n| b |"


def test_filling_a_page_again_changes_nothing(page: Path) -> None:
    figures = {"ms": "6 ms", "rows": "| a |"}
    fill(page, figures)
    once = page.read_text()
    fill(page, figures)
    assert page.read_text() == once


def test_a_page_without_the_mark_is_an_error(page: Path) -> None:
    with pytest.raises(ValueError, match="substring not found"):
        fill(page, {"other": "x"})


def test_a_recorded_command_names_no_folder_of_the_machine() -> None:
    given = ["--grid", "/data/probes/grid.json", "--traces", "/data/traces", "--scale", "0.1"]
    assert command("policies", given) == "python -m benchmarks.policies --grid grid.json --traces DIR --scale 0.1"
