from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from core.intake import duplicates
from core.intake.duplicates import Duplicates, Repeats


def found(folder: Path, rows: list[int], prompts: list[int], blocks: int) -> tuple[Repeats, Repeats]:
    keeper = Duplicates(folder)
    try:
        for part in np.array_split(np.arange(len(rows)), blocks):
            keeper.add((part + 1).tolist(), np.array(rows)[part], np.array(prompts)[part])
        return keeper.found()
    finally:
        keeper.close()


def test_repeats_are_counted_with_the_first_line_that_they_repeat(tmp_path: Path) -> None:
    rows, prompts = found(tmp_path, [7, 8, 7, 9, 7], [1, 2, 1, 2, 1], 1)
    assert rows == Repeats(2, [(3, 1), (5, 1)])
    assert prompts == Repeats(1, [(4, 2)])


def test_what_does_not_fit_in_memory_goes_to_files_and_gives_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    prompts = rng.integers(-900, 900, 5000)
    rows = prompts * 2 + rng.integers(0, 2, 5000)
    whole = found(tmp_path, rows.tolist(), prompts.tolist(), 1)
    monkeypatch.setattr(duplicates, "IN_MEMORY", 700)
    assert found(tmp_path, rows.tolist(), prompts.tolist(), 30) == whole
    assert whole[0].count == 5000 - len(set(rows.tolist()))
    assert list(tmp_path.iterdir()) == []
