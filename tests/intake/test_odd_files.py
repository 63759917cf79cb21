"""Each file of sample_data/odd becomes what its README says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from core.intake import dataset, rows

ODD = Path(__file__).parents[2] / "sample_data" / "odd"
TABLE = re.findall(r"^\| `(.+?)` \| (.+?) \|", (ODD / "README.md").read_text(), re.MULTILINE)


def test_the_table_names_every_file() -> None:
    assert {name for name, _ in TABLE} == {path.name for path in ODD.iterdir()} - {"README.md"}


@pytest.mark.parametrize(("name", "outcome"), TABLE)
def test_an_odd_file_becomes_what_the_table_says(name: str, outcome: str, tmp_path: Path) -> None:
    destination = tmp_path / "rows.parquet"
    expected = re.fullmatch(r"(\d+) rows?((?:, \w+)*)", outcome)
    if expected is None:
        with pytest.raises(dataset.InvalidDataset) as caught:
            dataset.ingest(ODD / name, destination, filename=name, tokenizer=None)
        assert caught.value.code == outcome
        assert name in caught.value.message
        assert list(tmp_path.iterdir()) == []
        return
    report = dataset.ingest(ODD / name, destination, filename=name, tokenizer=None)
    assert report.rows == rows.count(destination) == int(expected[1])
    assert {finding.code for finding in report.findings} == set(expected[2].split(", ")[1:])
