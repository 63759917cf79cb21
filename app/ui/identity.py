"""Whom the viewer is: the local admin while the console listens on this machine only, else whose token was given.

A token is kept for the browser tab's session, and nowhere else.
"""

from __future__ import annotations

import streamlit as st

from app.ui.data import client, forget, is_local, sign_in_as, signed_in_with
from app.ui.stale import end_page
from app.ui.text import plain
from core.api.tenant_schemas import Me
from core.errors import HarliError, Unauthorized

_FIELD = "sign_in_token"
_PLATFORM = "default"


@st.cache_data(ttl=10, show_spinner=False, max_entries=256)
def _me(token: str | None) -> Me:
    return client().me()


def me() -> Me:
    """Whom this session's token stands for. Raises HarliError."""
    return _me(signed_in_with())


def of_platform() -> bool:
    """Whether the viewer is of the tenant that runs the platform, which has alerts and settings to see. Where that
    cannot be told the pages say themselves what is wrong."""
    try:
        return me().tenant == _PLATFORM
    except HarliError:
        return True


def require_sign_in() -> None:
    """Ask for a token, and end the run until there is one, where the console is reached from other machines."""
    if is_local() or signed_in_with() is not None:
        return
    st.title("Sign in", anchor=False)
    st.caption("This console is reached from other machines, so that it asks who you are.")
    with st.form("sign_in", width=420):
        st.text_input("API token", type="password", key=_FIELD, autocomplete="current-password")
        st.form_submit_button("Sign in", type="primary", on_click=_sign_in)
    _show_fault()
    end_page()


def show_identity() -> None:
    """In the sidebar: who one is, and the way to be another one."""
    try:
        who = me()
        label = f"{who.user} · {who.tenant}"
    except Unauthorized:
        label = "Token refused"
    except HarliError:
        return
    with st.popover(label, icon=":material/person:", key="identity", type="tertiary"):
        if label != "Token refused":
            areas = ", ".join(who.scopes) or "nothing: it only reads"
            st.caption(f"{plain(who.role)} of tenant {plain(who.tenant)}; may change {plain(areas)}")
        with st.form("sign_in", border=False):
            st.text_input("Sign in as, by API token", type="password", key=_FIELD, autocomplete="off")
            st.form_submit_button("Sign in", on_click=_sign_in)
        _show_fault()
        if signed_in_with() is not None:
            st.button("Sign out", icon=":material/logout:", key="sign_out", on_click=_sign_out)


def _sign_in() -> None:
    """Take the token that was typed, if the API does."""
    token = st.session_state[_FIELD].strip()
    st.session_state[_FIELD] = ""
    before = signed_in_with()
    sign_in_as(token)
    try:
        client().me()
    except HarliError as error:
        sign_in_as(before)
        st.session_state["_sign_in_fault"] = error.message
        return
    st.session_state.pop("_sign_in_fault", None)
    forget()


def _sign_out() -> None:
    sign_in_as(None)
    forget()


def _show_fault() -> None:
    fault = st.session_state.get("_sign_in_fault")
    if fault:
        st.error(plain(fault), icon=":material/error:")
