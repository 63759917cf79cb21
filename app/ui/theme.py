"""Colours with a meaning: the same thing has the same colour in every chart, in light and dark."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import streamlit as st

ICON = Path(__file__).parent / "assets" / "icon.svg"
_WORDMARK = Path(__file__).parent / "assets" / "wordmark.svg"
_PAGE_CSS = (Path(__file__).parent / "assets" / "page.css").read_text()


@dataclass(frozen=True, slots=True)
class Colours:
    decode: str
    decode_soft: str
    finetune: str
    finetune_soft: str
    target: str
    stall: str
    segments: tuple[str, ...]


_LIGHT = Colours(
    decode="#3457d5",
    decode_soft="#9fb1f0",
    finetune="#d9822b",
    finetune_soft="#efc08f",
    target="#c2415c",
    stall="#8e5bd0",
    segments=("#dbe4ff", "#ffe8cc", "#d3f2e5", "#eadcff", "#ffdde4", "#fff2b8"),
)
_DARK = Colours(
    decode="#7d97ff", decode_soft="#4a5ea8", finetune="#f0a456", finetune_soft="#8a6238", target="#ec7a92",
    stall="#b48df0",
    segments=("#2a3a6b", "#5c421f", "#1f4f3e", "#463266", "#602b3a", "#56501f"),
)  # fmt: skip


def colours() -> Colours:
    """The palette of the theme that the viewer sees."""
    return _DARK if st.context.theme.type == "dark" else _LIGHT


@lru_cache(maxsize=1)
def _style() -> Any:
    return st.components.v2.component("harli.page", css=_PAGE_CSS, isolate_styles=False)


def apply_page_style() -> None:
    """Add the console's style sheet to the page. As a component, so that the browser fetches the script that draws
    components, tables and tiles among them, while the page is still read from the API."""
    _style()(key="page_style")


def show_brand() -> None:
    """The name above the navigation, in the ink of the theme at any moment: no page is run again when that changes."""
    st.logo(_WORDMARK, size="large", icon_image=ICON)
