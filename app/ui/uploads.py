"""What the upload forms of data sets and adapters share: names, limits, one upload per press."""

from __future__ import annotations

import re

import streamlit as st

from app.ui.data import settings
from core.api.schemas import NAME

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
