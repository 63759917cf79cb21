"""Audit: who changed what, when, from where, and what came of it."""

from __future__ import annotations

from typing import Any

import streamlit as st

from app.ui.data import client
from app.ui.page import heading, reading, teach
from app.ui.paging import ROWS, leaf_through
from app.ui.table import Cell, Column, Row, Tone, cell, table
from app.ui.text import plain, when
from core.api.tenant_schemas import AuditEntry

_OUTCOMES: dict[str, Tone] = {"done": "good", "refused": "warn", "failed": "bad"}
_COLUMNS = [
    Column("Time", "time"), Column("User"), Column("Action", "mono"), Column("Object", "mono", wide=True),
    Column("Outcome", "badge"), Column("From", wide=True),
]  # fmt: skip


def row(entry: AuditEntry) -> Row:
    return Row(
        str(entry.id),
        (
            cell(entry.time),
            cell(entry.user, entry.tenant),
            cell(entry.action),
            cell(entry.ref or ", ".join(change.id for change in entry.changes) or "–"),
            Cell(entry.outcome, entry.code or "", _OUTCOMES[entry.outcome]),
            cell(entry.address),
        ),
    )


def show(entry: AuditEntry) -> None:
    """One entry in full: each field before and after."""
    with st.container(border=True, key="entry"):
        what = f"**{plain(entry.action)}** {plain(entry.ref or '')}".strip()
        st.markdown(f"{what} by {plain(entry.user)} ({plain(entry.tenant)}), {when(entry.time)}")
        if not entry.changes:
            st.caption(f"It changed nothing: {plain(entry.outcome)}{f' with {entry.status}' if entry.status else ''}.")
        for change in entry.changes:
            st.caption(f"{plain(change.table)} {plain(change.id)} {change.change}")
            fields = [
                Row(name, (cell(name), cell(values[0]), cell(values[1]))) for name, values in change.fields.items()
            ]
            if fields:
                key = f"fields_{change.table}_{change.id}"
                table([Column("Field"), Column("Before"), Column("After")], fields, key=key, openable=False)


heading("Audit", "Who changed what, when, from where: every change, and every one that was refused.")
with st.container(horizontal=True, vertical_alignment="bottom"):
    user = (
        st.text_input(
            "User", key="audit_user", width=180, max_chars=63, placeholder="everyone", bind="query-params"
        ).strip()
        or None
    )
    text = (
        st.text_input(
            "Action or object",
            key="audit_text",
            width=240,
            max_chars=100,
            placeholder="such as jobs",
            bind="query-params",
        ).strip()
        or None
    )
    outcome = st.selectbox("Outcome", ["all", *_OUTCOMES], key="audit_outcome", bind="query-params", width=160)
wanted: dict[str, Any] = {"user": user, "text": text, "outcome": None if outcome == "all" else outcome}
with reading("the audit log"):
    entries = leaf_through("audit", lambda cursor: client().audit(ROWS, cursor, **wanted), of=str(wanted))
if entries:
    # An entry that is opened stands above the table, where the viewer is sure to see it.
    opened = st.container()
    pressed = table(_COLUMNS, [row(entry) for entry in entries], key="audit", selected=st.session_state.get("_entry"))
    st.session_state["_entry"] = pressed or st.session_state.get("_entry")
    entry = next((entry for entry in entries if str(entry.id) == st.session_state["_entry"]), None)
    with opened:
        if entry is not None:
            show(entry)
        else:
            st.caption("Press an entry to see each field before and after.")
elif any(wanted.values()):
    st.caption("Nothing in the log fits that; empty a field above to see more.")
else:
    teach(
        "Nothing has been changed yet",
        "Each change to data sets, jobs, adapters, targets, users or tokens leaves a line here, in the transaction "
        "that made it; so does each one that was refused.",
        "harli audit\nharli audit --user ann --outcome refused",
        "curl '{api}/api/audit?outcome=refused'",
    )
