"""What the upload forms of data sets and adapters share: names, limits, and that what was sent is opened."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

import streamlit as st

from app.ui.data import settings
from app.ui.page import reading
from app.ui.sending import collect, lead_to, new_form
from app.ui.stale import end_page
from app.ui.text import plain
from core.api.schemas import NAME, NameCheck

Kind = Literal["adapter", "dataset"]
_WORDS: dict[Kind, str] = {"adapter": "adapter", "dataset": "data set"}

_NAME = re.compile(NAME)
_ENDINGS = re.compile(r"(\.(jsonl?|csv|tsv|txt|parquet|arrow|zip|tar|tgz|gz|zst|safetensors))+$")


def limit_mib() -> int:
    """MiB that the browser may send: Streamlit keeps uploads in memory, so its limit may be the lower one."""
    return min(int(st.get_option("server.maxUploadSize")), settings().max_upload_mib)


def name_from(filename: str) -> str:
    """A name that the API takes, made of a file's name; empty when nothing is left of it."""
    stem = _ENDINGS.sub("", filename.lower())
    return re.sub(r"[^a-z0-9._-]+", "-", stem).strip("-._")[:63]


def name_fault(name: str) -> str | None:
    """Why the name cannot be used, or None."""
    if not name:
        return "Give a name."
    if _NAME.match(name):
        return None
    return (
        f"'{name}' cannot be a name: use lower-case letters, digits, dots, dashes and underscores, beginning with a "
        "letter or digit, at most 63."
    )


def upload_form(kind: Kind) -> dict[str, Any]:
    """The session's record of the upload form; `round` numbers its files, so that those that were sent leave it."""
    form: dict[str, Any] = st.session_state.setdefault(f"_{kind}_upload", new_form(round=0))
    return form


def open_what_was_sent(kind: Kind) -> None:
    """Lead to what the form's upload has made, instead of the page. To be called before the page is drawn."""
    form = upload_form(kind)
    collect(form, "upload")
    made: str | None = form["made"]
    if made is None:
        return
    if st.query_params.get(kind) == made:
        form.update(round=form["round"] + 1, made=None)
        return
    st.caption(f":material/hourglass_top: Opening the {_WORDS[kind]} …")
    lead_to(kind, made)
    end_page()


def name_field(kind: Kind, first: str, check: Callable[[str], NameCheck]) -> tuple[str, bool]:
    """Draw the field of the name, which `first` fills, and what is wrong with what it holds. The name, and whether an
    upload may have it: it is free, or a new version is wanted."""
    name = st.text_input(
        "Name", first, key=f"{kind}_name_{upload_form(kind)['round']}_{first}", live="400ms", max_chars=63,
        placeholder="support-bot",
    ).strip()  # fmt: skip
    fault = name_fault(name)
    if fault:
        st.warning(plain(fault), icon=":material/edit:")
        return name, False
    with reading("the names"):
        found = check(name)
    if found.available:
        return name, True
    st.warning(plain(found.reason or f"The name {name} is taken."), icon=":material/edit:")
    return name, st.checkbox(f"Store it as a new version of that {_WORDS[kind]}", key=f"{kind}_new_version")
