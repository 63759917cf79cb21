"""A two-dimensional pool of blocks: a column for each tensor, a row for a block of tokens across all of them.

This is the KV cache's shape: a column is one layer's K or V, and growing or shrinking maps or unmaps rows at the end of
every column. The tensors are made once, at their full size, over reserved addresses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from core.memory.arena import Arena, Region, map_all, pages_of, unmap_all, view


class Rows:
    """Columns of `tokens` tokens, `token_bytes` each, of `owner`; no row is mapped at first.

    A row is as many tokens as one page of the widest column holds, so that a page belongs to one row of its column, but
    for columns that are narrower than the widest.
    """

    def __init__(self, arena: Arena, owner: str, token_bytes: Sequence[int], tokens: int) -> None:
        self.arena = arena
        self.token_bytes = tuple(token_bytes)
        self.row_tokens = max(1, arena.page_bytes // max(token_bytes))
        self.tokens = tokens
        self.rows = 0
        self._regions: list[Region] = [
            arena.reserve(owner, pages_of(arena, size * tokens)) for size in self.token_bytes
        ]

    @property
    def most(self) -> int:
        """All rows."""
        return self.rows_of(self.tokens)

    def rows_of(self, tokens: int) -> int:
        """Rows that hold the first `tokens` tokens."""
        return -(-tokens // self.row_tokens)

    def tokens_of(self, rows: int) -> int:
        """Tokens that the first `rows` rows hold."""
        return min(self.tokens, rows * self.row_tokens)

    def pages_of(self, rows: int) -> int:
        """Pages of all columns behind the first `rows` rows."""
        return sum(self._column_pages(rows))

    def tensor(self, column: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The column as a tensor of `shape`, whose first dimension is tokens."""
        return view(self.arena, self._regions[column], shape, dtype)

    def resize(self, rows: int) -> None:
        """Map or unmap, so that exactly the first `rows` rows are mapped.

        Raises `ArenaFull`, with the rows as they were, when the arena has not enough pages. Rows that go must not be in
        use by anything. May run in any thread, one at a time.
        """
        before, after = self._column_pages(self.rows), self._column_pages(rows)
        if rows < self.rows:
            self.rows = rows  # also when the driver refuses: what of the others is still mapped then is not known
            unmap_all(self._regions, after, [had - has for had, has in zip(before, after, strict=True)])
        else:
            map_all(self._regions, before, [has - had for had, has in zip(before, after, strict=True)])
            self.rows = rows

    def _column_pages(self, rows: int) -> list[int]:
        tokens = self.tokens_of(rows)
        return [pages_of(self.arena, size * tokens) for size in self.token_bytes]
