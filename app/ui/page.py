"""What every page has: its heading, the outcome of the last action, errors that say what to do, empty states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import streamlit as st

from app.ui.data import forget, settings, signed_in_with
from app.ui.report import show_findings
from app.ui.stale import end_page
from app.ui.text import plain
from core.errors import HarliError, Invalid, NotFound, Unavailable

_FAULTS = "_faults"


@dataclass(frozen=True, slots=True)
class Fault:
    """A failed action: what was tried, and the error."""

    action: str
    error: HarliError


def show_fault(fault: Fault) -> None:
    """An error with its message (place, value, remedy), its code and the field at fault."""
    where = f" · field `{fault.error.param}`" if fault.error.param else ""
    st.error(
        f"**{plain(fault.action)} failed.** {plain(fault.error.message)}  \n`{fault.error.code}`{where}",
        icon=":material/error:",
    )
    if isinstance(fault.error, Invalid) and fault.error.report is not None:
        show_findings(fault.error.report)


def attempt(action: str, call: Callable[[], object], done: str | None = None, *, place: str = "page") -> bool:
    """Run an action; its error is kept for `show_faults(place)`, its success is told in passing. True on success.

    Between the start of `call` and its end nothing of Streamlit is touched, so that a second press, which ends the run
    of the first at its next touch, never cuts an action in two.
    """
    faults = st.session_state.setdefault(_FAULTS, {})
    try:
        call()
    except HarliError as error:
        faults[place] = Fault(action, error)
        return False
    finally:
        forget()
    faults.pop(place, None)
    if done:
        st.toast(plain(done), icon=":material/check_circle:")
    return True


def show_faults(place: str = "page") -> None:
    """The error of the last action at `place`, until another action there succeeds or it is dismissed."""
    faults: dict[str, Fault] = st.session_state.setdefault(_FAULTS, {})
    fault = faults.get(place)
    if fault is None:
        return
    show_fault(fault)
    st.button("Dismiss", key=f"dismiss_{place}", type="tertiary", on_click=_dismiss, args=(place,))


def _dismiss(place: str) -> None:
    st.session_state[_FAULTS].pop(place, None)


def forget_faults() -> None:
    """Called when another page is opened: an error stays with the page it happened on."""
    st.session_state[_FAULTS] = {}


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Around the reads that a page (or a live part of it) cannot do without: an error is shown and the run ends."""
    try:
        yield
    except HarliError as error:
        show_fault(Fault(f"Reading {what}", error))
        if isinstance(error, NotFound):
            st.button("Back to the list", icon=":material/arrow_back:", key=f"back_{what}", on_click=_to_the_list)
        if isinstance(error, Unavailable):
            st.button("Try again", icon=":material/refresh:", key=f"again_{what}")
        end_page()


def _to_the_list() -> None:
    """Leave what the address names and is not there (any more)."""
    st.query_params.clear()


def heading(title: str, summary: str) -> None:
    """The page's heading and one line that says what it is for, then the last action's error."""
    st.title(plain(title), anchor=False)
    st.caption(summary)
    show_faults()


def teach(title: str, what: str, cli: str = "", http: str = "", *, icon: str = ":material/lightbulb:") -> None:
    """An empty state: what would be here, what to do next, and (where the page does not have it elsewhere) the same
    from a shell or over HTTP."""
    with st.container(border=True):
        st.markdown(f"{icon} **{title}**")
        st.markdown(what)
        if cli:
            elsewhere(cli, http)


@st.fragment
def elsewhere(cli: str, http: str) -> None:
    """The same from a shell and over HTTP, drawn once it is opened: what colours code is the largest script of the
    console, and a page that loads it shows its content a quarter of a second later. Each request of `http` is given the
    token that the API asks for."""
    box = st.expander(
        "From a shell or over HTTP", icon=":material/terminal:", key=f"elsewhere_{cli.splitlines()[0]}",
        on_change="rerun",
    )  # fmt: skip
    if not box.open:
        return
    shell, web = box.tabs(["Command line", "HTTP"])
    shell.code(cli, language="bash")
    token = f"HARLI_TOKEN=$(cat {settings().token_file})" if signed_in_with() is None else "HARLI_TOKEN=..."
    shown = http.replace("curl ", 'curl -H "Authorization: Bearer $HARLI_TOKEN" ').replace("{api}", settings().api_url)
    web.code(f"{token}\n{shown}", language="bash")


def confirm(
    label: str, question: str, answer: str, on_click: Callable[[], None], *, key: str, icon: str = ":material/delete:"
) -> None:
    """A destructive action: the button opens a question, and only the answer inside acts."""
    with st.popover(label, icon=icon, key=f"{key}_ask"):
        st.markdown(question)
        st.button(answer, type="primary", key=key, on_click=on_click)
