"""Content before charts: the charts' script is by far the largest of the console, and while the browser reads it, it
shows nothing else. So a page that has just been opened draws its figures, and its charts once those are on the screen
(``assets/drawn.js`` says when). The session's later pages find the script there and draw all at once."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import streamlit as st

_ASSETS = Path(__file__).parent / "assets"
_BEGUN = "_begun"
_ALL = ""


@lru_cache(maxsize=1)
def _component() -> Any:
    return st.components.v2.component("harli.drawn", js=(_ASSETS / "drawn.js").read_text())


def content_is_there(part: str) -> bool:
    """Whether the fragment that asks may go on to its charts. If not, it is to end here: it runs again at once when the
    browser shows what it has drawn, or with its next refresh. `part` is the fragment's own name."""
    begun: set[str] = st.session_state.setdefault(_BEGUN, set())
    if part in begun:
        begun.add(_ALL)
    if _ALL in begun:
        return True
    begun.add(part)
    _component()(key=f"drawn_{part}", on_drawn_change=lambda: None)
    return False
