"""What the press of a form sends: in a thread of its own, so that the page can show how far it is, and end it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import streamlit as st

from app.ui.data import client
from app.ui.page import attempt
from app.ui.press import first_to_act, forget_press
from app.ui.text import plain, size
from core.errors import HarliError, NotFound

_POOL = ThreadPoolExecutor(16, thread_name_prefix="sending")


@dataclass(frozen=True)
class Sending:
    """`action` is what is tried and `success` what is told once it is done, in words; `operation` the id under which
    the API tells how far it is; `future` gives the id of what was made."""

    action: str
    success: str
    operation: str
    future: Future[str]

    @property
    def through(self) -> bool:
        return self.future.done()


def new_form(**own: Any) -> dict[str, Any]:
    """The record of a form that sends: what is on its way, and what came of it."""
    return {"sending": None, "made": None, **own}


def send(form: dict[str, Any], action: str, success: str, call: Callable[[str], str]) -> None:
    """Act on the form's press: begin to call `call` with the id of its operation. A press beside one that was acted on
    does nothing."""
    if first_to_act(form) and form["sending"] is None and form["made"] is None:
        operation = f"console-{uuid4().hex[:16]}"
        form["sending"] = Sending(action, success, operation, _POOL.submit(call, operation))


def collect(form: dict[str, Any], place: str) -> None:
    """Take what the form's sending came to, once that is through: the id of what it `made`, or an error for
    `show_faults(place)`."""
    sending: Sending | None = form["sending"]
    if sending is None or not sending.through:
        return

    def take() -> None:
        form.update(made=sending.future.result(), sending=None)

    forget_press(form)
    if not attempt(sending.action, take, sending.success, place=place):
        form["sending"] = None


def lead_to(param: str, made: str) -> None:
    """Put what was made into the page's address, and draw the page anew once the browser has told that address. Until
    then the form has to stay what was sent: what the browser asked for before it knew comes with the address of before,
    and would be drawn as a form that nobody has sent, under the address of what was made."""
    _follow(param, made)
    st.query_params[param] = made


@st.fragment(run_every="0.1s")
def _follow(param: str, made: str) -> None:
    """Drawn before the address is set, so that only a refresh, which comes with the browser's address, finds it."""
    if st.query_params.get(param) == made:
        st.rerun()


@st.fragment(run_every="0.5s")
def watch(form: dict[str, Any]) -> None:
    """How far the form's sending is, and the way to end it; draws the page anew when it is through."""
    sending = _under_way(form)
    if sending is None:
        return
    try:
        found = client().operation(sending.operation)
        share = min(found.done / found.total, 1.0) if found.total else 0.0
        st.progress(share, f"Checking every row: {size(found.done)} of {size(found.total)}")
    except NotFound:
        st.progress(0.0, f"{plain(sending.action)} …")
    except HarliError as error:
        st.caption(plain(error.message))
    st.button("Cancel", icon=":material/close:", key="cancel_upload", on_click=_cancel, args=(sending.operation,))


@st.fragment(run_every="0.5s")
def wait(form: dict[str, Any], said: str) -> None:
    """The same of what the API tells no progress of, and cannot end."""
    if _under_way(form) is not None:
        st.caption(f":material/hourglass_top: {said}")


def _under_way(form: dict[str, Any]) -> Sending | None:
    """None where there is nothing on its way, or a run has taken what came of it: a refresh that comes late must not
    ask for a run then, which would be one of the address from before that."""
    sending: Sending | None = form["sending"]
    if sending is not None and sending.through:
        st.rerun()
    return sending


def _cancel(operation: str) -> None:
    try:
        client().cancel_operation(operation)
    except HarliError:
        st.toast("The check has not begun yet; press once more.", icon=":material/hourglass_top:")
