"""Counts as bars with their numbers, for what stands still."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import streamlit as st

from app.ui.text import number


def bars_html(counts: Sequence[tuple[str, int]]) -> str:
    """One line a count: its label, a bar as long as its share of the largest, the number."""
    most = max((count for _, count in counts), default=1) or 1
    lines = (
        f'<div><span class="label">{escape(label)}</span><span class="bar"><i style="width:{100 * count / most:.1f}%">'
        f'</i></span><span class="count">{number(count)}</span></div>'
        for label, count in counts
    )
    return f'<div class="bars">{"".join(lines)}</div>'


def show_bars(title: str, counts: Sequence[tuple[str, int]]) -> None:
    st.markdown(f"**{title}**")
    st.html(bars_html(counts))
