"""A strip of figures; updates in place (``assets/tiles.js``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import streamlit as st

from app.ui.theme import colours

_ASSETS = Path(__file__).parent / "assets"


@dataclass(frozen=True, slots=True)
class BarPart:
    share: float
    tone: Literal["decode", "finetune", "plain"] = "plain"


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure: label, value with unit, a note below (the target, say) and an optional bar of shares of one."""

    label: str
    value: str
    unit: str = ""
    note: str = ""
    tone: Literal["", "good", "warn", "bad"] = ""
    help: str = ""
    bar: tuple[BarPart, ...] = ()


@lru_cache(maxsize=1)
def _component() -> Any:
    return st.components.v2.component(
        "harli.tiles",
        html='<div class="tiles" data-tiles></div>',
        css=(_ASSETS / "tiles.css").read_text(),
        js=(_ASSETS / "tiles.js").read_text(),
    )


def tiles(figures: Sequence[Tile], *, key: str, columns: int) -> None:
    """Draw the strip, `columns` of them in a row where the page is wide enough."""
    palette = colours()
    _component()(
        key=key,
        data={
            "columns": columns,
            "tiles": [asdict(figure) for figure in figures],
            "colours": {"decode": palette.decode, "finetune": palette.finetune},
        },
    )
