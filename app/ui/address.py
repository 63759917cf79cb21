"""A page shows what the browser's address names.

Streamlit (1.67) draws a page for the address that came with a request, and tells the browser of a change that the run
made; what was asked for in between, or is lost on the way, leaves the page of one address under another, until the next
press. So the sidebar's refresh, which comes with the browser's own address every two seconds, looks whether that names
what the page was drawn for, and has it drawn anew where it twice in a row does not: once is on its way.
"""

from __future__ import annotations

import streamlit as st

_NAMES = ("job", "dataset", "adapter")  # what opens one thing on a page that lists many
_DRAWN, _DOUBTED = "_drawn_for", "_address_doubted"


def drawn_for_this_address() -> None:
    """At the start of a run of the whole page."""
    st.session_state[_DRAWN], st.session_state[_DOUBTED] = _named(), False


def keep_to_address() -> None:
    """In the sidebar's refresh. Ends it with a run of the whole page where that shows something else."""
    differs = _named() != st.session_state.get(_DRAWN)
    again, st.session_state[_DOUBTED] = st.session_state.get(_DOUBTED, False), differs
    if differs and again:
        st.rerun()


def _named() -> tuple[str | None, ...]:
    return tuple(st.query_params.get(name) for name in _NAMES)
