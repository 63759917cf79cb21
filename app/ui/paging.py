"""Long listings, a page of the API at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import streamlit as st

from core.api.schemas import Page

T = TypeVar("T")

ROWS = 50
"""Rows of a page that is shown."""


def leaf_through(name: str, read: Callable[[str | None], Page[T]], of: str = "") -> list[T]:
    """The rows of the page that the viewer has turned to, with the buttons to turn it.

    `read` gets the page's cursor. `of` says what is listed: when it changes, the first page is shown.
    """
    key = f"_pages_{name}"
    if st.session_state.get(key, {}).get("of") != of:
        st.session_state[key] = {"of": of, "cursors": [None]}
    cursors: list[str | None] = st.session_state[key]["cursors"]
    page = read(cursors[-1])
    if len(cursors) > 1 or page.next:
        with st.container(horizontal=True, key=f"turn_{name}", width="content"):
            st.button(
                "Newer", icon=":material/chevron_left:", key=f"newer_{name}", on_click=_back, args=(key,),
                disabled=len(cursors) == 1,
            )  # fmt: skip
            st.button(
                "Older", icon=":material/chevron_right:", key=f"older_{name}", on_click=_on, args=(key, page.next),
                disabled=page.next is None,
            )  # fmt: skip
    return page.items


def _back(key: str) -> None:
    st.session_state[key]["cursors"].pop()


def _on(key: str, cursor: str) -> None:
    st.session_state[key]["cursors"].append(cursor)


def every(read: Callable[[str | None], Page[T]]) -> list[T]:
    """All rows of a listing."""
    page = read(None)
    items = list(page.items)
    while page.next is not None:
        page = read(page.next)
        items += page.items
    return items
