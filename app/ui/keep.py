"""What a viewer has begun to fill in stays when another page is opened; Streamlit forgets fields that are not drawn."""

from __future__ import annotations

import streamlit as st

# Fields that have no place in the address.
_TARGET = ("tenant", "kind", "ms", "share", "weekly", "days", "start", "end", "zone")
_RULE = ("name", "metric", "comparison", "threshold", "window_s", "for_s", "severity", "enabled")
_KEPT = ("frontier_ms", *(f"new_target_{name}" for name in _TARGET), *(f"rule_{name}" for name in _RULE))


def keep_fields() -> None:
    """To be called on every page, before it is drawn."""
    for key in _KEPT:
        if key in st.session_state:
            st.session_state[key] = st.session_state[key]
