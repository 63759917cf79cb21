"""Names and limits of uploads."""

from __future__ import annotations

import pytest

from app.ui.uploads import name_fault, name_from


@pytest.mark.parametrize(
    ("filename", "name"),
    [
        ("My Rows.jsonl", "my-rows"),
        ("support.jsonl.gz", "support"),
        ("Übung 3.csv", "bung-3"),
        ("v1.2-rows.parquet", "v1.2-rows"),
        ("....jsonl", ""),
        ("x" * 80 + ".csv", "x" * 63),
    ],
)
def test_a_name_is_made_of_the_files(filename: str, name: str) -> None:
    assert name_from(filename) == name


def test_a_name_is_checked_before_anything_is_sent() -> None:
    assert name_fault("support-bot.v2") is None
    assert name_fault("") == "Give a name."
    assert "'Support Bot' cannot be a name" in (name_fault("Support Bot") or "")
