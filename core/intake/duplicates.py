"""Which rows repeat earlier ones, for files of any length.

What is kept of a row are two hashes and its place, 24 bytes. Beyond a million rows they go to files, cut by the
prompt's hash: rows that repeat each other have the same one, so that each file can be looked at alone.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl

from core.intake.findings import EXAMPLES

IN_MEMORY = 1 << 20
PARTS = 32
_ENTRY = np.dtype([("line", "<i8"), ("row", "<i8"), ("prompt", "<i8")])
_Entries = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class Repeats:
    """How many rows repeat an earlier one, and (line, line of the first) of the first of them."""

    count: int
    examples: list[tuple[int, int]]


class Duplicates:
    """Takes rows in the order of the file. `close` it; its files lie in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._spilled: Path | None = None
        self._kept: list[_Entries] = []
        self._count = 0

    def add(
        self, lines: Sequence[int] | npt.NDArray[np.int64], rows: npt.NDArray[np.int64], prompts: npt.NDArray[np.int64]
    ) -> None:
        """Rows by where they begin, and by the hashes of all of each and of its prompt."""
        entries = np.empty(len(lines), dtype=_ENTRY)
        entries["line"], entries["row"], entries["prompt"] = lines, rows, prompts
        self._kept.append(entries)
        self._count += len(entries)
        if self._count >= IN_MEMORY:
            self._spill()

    def found(self) -> tuple[Repeats, Repeats]:
        """Rows that are the same as an earlier one, and rows that share their prompt only."""
        rows, prompts = [], []
        for entries in self._parts():
            same = _repeats(entries["row"])
            rows.append(_told(entries, entries["row"], same))
            prompts.append(_told(entries, entries["prompt"], _repeats(entries["prompt"]) & ~same))
        return _joined(rows), _joined(prompts)

    def close(self) -> None:
        if self._spilled is not None:
            shutil.rmtree(self._spilled, ignore_errors=True)

    def _entries(self) -> _Entries:
        entries = np.concatenate([np.empty(0, dtype=_ENTRY), *self._kept])
        self._kept, self._count = [], 0
        return entries

    def _spill(self) -> None:
        if self._spilled is None:
            self._spilled = Path(tempfile.mkdtemp(prefix=".duplicates-", dir=self._folder))
        entries = self._entries()
        part_of = entries["prompt"] % PARTS
        for part in range(PARTS):
            with (self._spilled / str(part)).open("ab") as file:
                entries[part_of == part].tofile(file)

    def _parts(self) -> Iterator[_Entries]:
        if self._spilled is None:
            yield self._entries()
            return
        self._spill()
        for part in range(PARTS):
            yield np.fromfile(self._spilled / str(part), dtype=_ENTRY)


def _repeats(hashes: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Where a value equals an earlier one."""
    return ~pl.Series(np.ascontiguousarray(hashes)).is_first_distinct().to_numpy()


def _told(entries: _Entries, hashes: npt.NDArray[np.int64], repeats: npt.NDArray[np.bool_]) -> Repeats:
    where = np.flatnonzero(repeats)
    lines = entries["line"]
    return Repeats(
        len(where), [(int(lines[at]), int(lines[np.argmax(hashes == hashes[at])])) for at in where[:EXAMPLES]]
    )


def _joined(parts: Sequence[Repeats]) -> Repeats:
    examples = sorted(example for part in parts for example in part.examples)
    return Repeats(sum(part.count for part in parts), examples[:EXAMPLES])
