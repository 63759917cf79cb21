"""A dense table whose rows open something; updates in place (``assets/table.js``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import streamlit as st

Tone = Literal["good", "busy", "warn", "bad", "idle"]
_ASSETS = Path(__file__).parent / "assets"


@dataclass(frozen=True, slots=True)
class Column:
    """`kind`: how a cell is drawn; `end`: aligned right; `wide`: left out on a narrow screen."""

    label: str
    kind: Literal["text", "mono", "badge", "time"] = "text"
    end: bool = False
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """`share` draws a bar under the text, `note` a second, quieter line."""

    text: str
    note: str = ""
    tone: Tone = "idle"
    share: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    id: str
    cells: tuple[Cell, ...]


def cell(value: object, note: str = "") -> Cell:
    """A cell of one value; a time is sent as ISO 8601, so that the browser shows it in its own zone."""
    if value is None:
        return Cell("", note)
    return Cell(value.isoformat() if isinstance(value, datetime) else str(value), note)


@lru_cache(maxsize=1)
def _component() -> Any:
    return st.components.v2.component(
        "harli.table",
        html='<div class="scroll" data-table></div>',
        css=(_ASSETS / "table.css").read_text(),
        js=(_ASSETS / "table.js").read_text(),
    )


def table(
    columns: Sequence[Column], rows: Sequence[Row], *, key: str, openable: bool = True, selected: str | None = None
) -> str | None:
    """Draw the table; the id of the row that was pressed in this run, or None."""
    result = _component()(
        key=key,
        data={
            "columns": [asdict(column) for column in columns],
            "rows": [asdict(row) for row in rows],
            "openable": openable,
            "selected": selected,
        },
        on_open_change=lambda: None,
    )
    pressed: str | None = result.open
    return pressed
