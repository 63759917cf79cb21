"""Rows of tokens across columns: mapped from the front, all columns or none."""

from __future__ import annotations

import pytest
import torch

from core.memory import _arena
from core.memory.arena import Arena, ArenaFull
from core.memory.rows import Rows

PAGE = 4096


def arena(pages: int) -> Arena:
    return _arena.memfd_arena(PAGE, pages)


def test_a_row_is_what_a_page_of_the_widest_column_holds() -> None:
    rows = Rows(arena(0), "kv", [100, 40], tokens=1000)
    assert (rows.row_tokens, rows.most) == (40, 25)
    assert [rows.rows_of(tokens) for tokens in (0, 1, 40, 41, 1000)] == [0, 1, 1, 2, 25]
    assert [rows.tokens_of(count) for count in (0, 1, 24, 25)] == [0, 40, 960, 1000]
    assert rows.pages_of(2) == 2 + 1


def test_every_token_of_the_mapped_rows_can_be_written() -> None:
    pool = arena(100)
    rows = Rows(pool, "kv", [100, 40], tokens=1000)
    wide, narrow = rows.tensor(0, (1000, 25), torch.float32), rows.tensor(1, (1000, 10), torch.float32)
    for count in (1, 7, 25, 3):
        rows.resize(count)
        tokens = rows.tokens_of(count)
        wide[:tokens], narrow[:tokens] = 1.0, 2.0
        assert float(wide[:tokens].sum() + narrow[:tokens].sum()) == tokens * 45
        assert pool.statistics().used == rows.pages_of(count)


def test_what_was_in_the_first_rows_stays() -> None:
    pool = arena(100)
    rows = Rows(pool, "kv", [128], tokens=640)
    column = rows.tensor(0, (640, 32), torch.float32)
    rows.resize(rows.most)
    column[:] = torch.arange(640)[:, None]
    address = column.data_ptr()
    rows.resize(4)
    rows.resize(rows.most)
    assert column.data_ptr() == address
    assert column[:128, 0].tolist() == list(range(128))


def test_growing_is_all_or_nothing() -> None:
    pool = arena(10)
    rows = Rows(pool, "kv", [128, 128, 128], tokens=640)
    rows.resize(2)
    with pytest.raises(ArenaFull, match="0 of 10 are free"):
        rows.resize(4)
    assert (rows.rows, pool.statistics().used) == (2, 6)
    rows.resize(3)
    assert pool.statistics().used == 9


def test_tokens_wider_than_a_page_are_a_row_each() -> None:
    pool = arena(100)
    rows = Rows(pool, "kv", [3 * PAGE], tokens=8)
    column = rows.tensor(0, (8, 3 * PAGE), torch.uint8)
    rows.resize(5)
    column[:5] = 1
    assert (rows.row_tokens, pool.statistics().used) == (1, 15)
