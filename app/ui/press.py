"""Presses that begin something. A run of the page can end between its start and the place of the button, because
another part of the page asked for a run: what ``st.button`` answers is lost then, and the press with it. And while the
run that acts on a press waits for the API, a second run draws the page beside it. So a press is noted by the button's
callback, before the page is drawn, stays noted until a run acts on it or what it was pressed beside is through, and is
taken by one run only."""

from __future__ import annotations

from typing import Any

import streamlit as st

_PRESSED = "pressed"


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
