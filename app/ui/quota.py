"""A tenant's finetuning quota: what it uses of it, and (for the platform's admins) setting it."""

from __future__ import annotations

import streamlit as st

from app.ui.data import client
from app.ui.page import attempt, reading, show_faults
from app.ui.text import number, plain
from core.api.job_schemas import Quota

_FIELDS = {
    "finetune_tokens_day": "Finetuning tokens a day", "running_jobs": "Running jobs", "waiting_jobs": "Waiting jobs",
}  # fmt: skip
_PRIORITY = "Highest priority of a job"
_USED = {"finetune_tokens_day": "tokens_today", "running_jobs": "running_now", "waiting_jobs": "waiting_now"}


def used(quota: Quota, field: str) -> str:
    """``1,200 of 5,000``; without a limit just what is used."""
    limit = getattr(quota, field)
    now = number(getattr(quota, _USED[field]))
    return f"{now} of {number(limit)}" if limit is not None else f"{now}, no limit"


def draw(tenant: str, *, editable: bool) -> None:
    with reading("the quota"):
        quota = client().quota(tenant)
    st.markdown(f"**Quota of {plain(tenant)}**")
    facts = [f"{label}: {used(quota, field)}" for field, label in _FIELDS.items()]
    st.caption(" · ".join([*facts, f"{_PRIORITY}: {quota.max_priority}"]))
    if not editable:
        return
    with st.form(f"quota_{tenant}"):
        for field, label in _FIELDS.items():
            st.number_input(label, 0, None, getattr(quota, field), 1, key=f"{field}_{tenant}", placeholder="no limit")
        st.number_input(_PRIORITY, -100, 100, quota.max_priority, 1, key=f"max_priority_{tenant}")
        st.form_submit_button("Set the quota", on_click=_set, args=(tenant,))
    show_faults("quota")


def _set(tenant: str) -> None:
    given = {field: st.session_state[f"{field}_{tenant}"] for field in (*_FIELDS, "max_priority")}
    attempt(f"Setting the quota of {tenant}", lambda: client().set_quota(tenant, **given), "Quota set", place="quota")
