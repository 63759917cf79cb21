"""Presses that begin something. A run of the page can end between its start and the place of the button, because
another part of the page asked for a run: what ``st.button`` answers is lost then, and the press with it. And while the
run that acts on a press waits for the API, a second run draws the page beside it. So a press is noted by the button's
callback, before the page is drawn, stays noted until a run acts on it or what it was pressed beside is through, and is
taken by one run only.

Streamlit (1.67) itself loses a press whose run another request overtakes before the callbacks are called: the run ends
there, and the run of the other request knows nothing of the press. So a run takes in what it came for first."""

from __future__ import annotations

from typing import Any

import streamlit as st
from streamlit.runtime.state import SafeSessionState

_PRESSED = "pressed"


def _take_in(self: SafeSessionState, *changed: Any, **more: Any) -> None:
    """Streamlit's ``SafeSessionState.on_script_will_rerun``, which looks first whether there is another request."""
    with self._lock:
        self._state.on_script_will_rerun(*changed, **more)


def keep_presses() -> None:
    """Once for the whole process; to be called before a page is run."""
    SafeSessionState.on_script_will_rerun = _take_in  # type: ignore[method-assign]


def pressed(label: str, form: dict[str, Any], *, key: str, icon: str, disabled: bool = False) -> bool:
    """Draw a form's button; whether a press of it waits to be acted on, by whoever is `first_to_act`. `form` is the
    form's own record, which outlives the run."""
    st.button(label, type="primary", key=key, icon=icon, disabled=disabled, on_click=_note, args=(form,))
    return not disabled and _PRESSED in form


def first_to_act(form: dict[str, Any]) -> bool:
    """Take the press. To be asked last: between this and what is to be done nothing of Streamlit may be touched, which
    could end the run there."""
    return bool(form.pop(_PRESSED, False))


def forget_press(form: dict[str, Any]) -> None:
    """A press beside one that was acted on asks for nothing more once that has come to something."""
    form.pop(_PRESSED, None)


def _note(form: dict[str, Any]) -> None:
    form[_PRESSED] = True
