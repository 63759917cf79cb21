"""Keeps a page whole when something that it no longer shows asks for a refresh.

Between a click on another page and the first message of that page's run, the browser still shows the old page: a button
pressed there, or a component that tells something, asks Streamlit (1.67) to run a fragment of the old page. It queues
that behind the new page's run and then tells the browser that the old page runs: the browser drops what it shows, the
fragment is gone, and the new page stays empty. So such a request is dropped here. Pages are changed by links alone,
never by ``st.switch_page``, so the page that the browser asked for last is the one that it will show.

A refresh of what the same page showed before is queued too, behind the run that shows it no longer. Streamlit has
forgotten that fragment by then, but not where the run was ended by ``st.stop``: it draws the fragment into a block that
the browser has dropped, which the browser takes for a fault, and shows nothing any more. So pages end by `end_page`.
Streamlit ends a run that another has replaced in the same way, perhaps late, and that must forget nothing: by then the
fragments are the other's.
"""

from __future__ import annotations

from typing import NoReturn
from weakref import WeakKeyDictionary

import streamlit as st
from streamlit.proto.ClientState_pb2 import ClientState
from streamlit.runtime.app_session import AppSession
from streamlit.runtime.scriptrunner import get_script_run_ctx

_request_rerun = AppSession.request_rerun
# Script hash of the page that each browser session asked for last; empty where it came by the page's address.
_asked: WeakKeyDictionary[AppSession, str] = WeakKeyDictionary()


def _unless_left(self: AppSession, client_state: ClientState | None) -> None:
    """Streamlit's ``AppSession.request_rerun``, but for requests of a page that was left."""
    if client_state is not None:
        page = client_state.page_script_hash
        if not client_state.fragment_id:
            _asked[self] = page
        elif _asked.get(self) not in ("", None, page):
            return
    _request_rerun(self, client_state)


def drop_requests_of_pages_left() -> None:
    """Once for the whole process; to be called before a page is run."""
    AppSession.request_rerun = _unless_left  # type: ignore[method-assign]


def end_page() -> NoReturn:
    """``st.stop``; of a run of the whole page nothing stays but the fragments that it has drawn."""
    context = get_script_run_ctx()
    if context is not None and not context.fragment_ids_this_run:
        context.yield_check()  # ends a run that another has replaced
        context.fragment_storage.clear(context.shared.new_fragment_ids.snapshot())
    st.stop()
