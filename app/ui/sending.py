"""An upload that is under way: sent in a thread of its own, so that the page can show how far it is, and end it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar
from uuid import uuid4

import streamlit as st

from app.ui.data import client
from app.ui.text import plain, size
from core.errors import HarliError, NotFound

T = TypeVar("T")
_POOL = ThreadPoolExecutor(16, thread_name_prefix="sending")


@dataclass(frozen=True)
class Sending(Generic[T]):
    """`operation` is the id under which the API tells how far it is."""

    filename: str
    operation: str
    future: Future[T]

    @property
    def done(self) -> bool:
        return self.future.done()


def send(filename: str, upload: Callable[[str], T]) -> Sending[T]:
    """Begin to call `upload` with the id of its operation."""
    operation = f"console-{uuid4().hex[:16]}"
    return Sending(filename, operation, _POOL.submit(upload, operation))


@st.fragment(run_every="0.5s")
def watch(sending: Sending[object]) -> None:
    """How far it is, and the way to end it; draws the page anew when it is through."""
    if sending.done:
        st.rerun()
    try:
        found = client().operation(sending.operation)
        share = min(found.done / found.total, 1.0) if found.total else 0.0
        st.progress(share, f"Checking every row: {size(found.done)} of {size(found.total)}")
    except NotFound:
        st.progress(0.0, f"Sending {sending.filename} …")
    except HarliError as error:
        st.caption(plain(error.message))
    st.button("Cancel", icon=":material/close:", key="cancel_upload", on_click=_cancel, args=(sending.operation,))


@st.fragment(run_every="0.5s")
def wait(sending: Sending[object], said: str) -> None:
    """The same of what the API tells no progress of, and cannot end."""
    if sending.done:
        st.rerun()
    st.caption(f":material/hourglass_top: {said}")


def _cancel(operation: str) -> None:
    try:
        client().cancel_operation(operation)
    except HarliError:
        st.toast("The check has not begun yet; press once more.", icon=":material/hourglass_top:")
