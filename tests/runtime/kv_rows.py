"""The KV pool's rows, as a broker under test sees them: a pool of SGLang's has one token more than slots."""

from __future__ import annotations

from core.memory.rows import Rows


class KvRows:
    """What of a pool follows from its rows."""

    _rows: Rows

    def rows_of(self, tokens: int) -> int:
        return min(self._rows.most, self._rows.rows_of(tokens + 1))

    def slots_of(self, rows: int) -> int:
        return self._rows.tokens_of(rows) - 1

    def pages_of(self, tokens: int) -> int:
        return self._rows.pages_of(self.rows_of(tokens))

    def growth(self, steps: float) -> int:
        return 0
