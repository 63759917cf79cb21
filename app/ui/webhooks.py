"""Webhooks: addresses that are told what happens to jobs, and how their deliveries went."""

from __future__ import annotations

from typing import get_args

import streamlit as st

from app.ui.data import client
from app.ui.page import attempt, confirm, reading, show_faults, teach
from app.ui.table import Cell, Column, Row, cell, table
from app.ui.text import plain
from core.api.job_schemas import Delivery, Webhook, WebhookEvent

_SECRET = "_webhook_secret"
_SHOWN = 20


def draw() -> None:
    with reading("the webhooks"):
        webhooks = client().webhooks().items
    show_faults("webhooks")
    if secret := st.session_state.pop(_SECRET, None):
        st.success("The events are signed with this secret. It is shown this once:", icon=":material/key:")
        st.code(secret, language=None)
    if not webhooks:
        teach(
            "No webhook yet",
            "A webhook is an address of yours that is told when a job is submitted, runs, pauses, ends or will miss "
            "its deadline. Events are signed with HMAC-SHA256 (Standard Webhooks) and tried again for about a day. "
            "Give the address below.",
            "harli webhooks create https://example.com/hooks/harli --event job.failed",
            "curl {api}/api/webhooks -H 'content-type: application/json' -d '{\"url\": \"https://example.com/hook\"}'",
        )
    for webhook in webhooks:
        _one(webhook)
    with st.expander("New webhook", expanded=not webhooks, icon=":material/add:"):
        st.text_input("Address", key="webhook_url", placeholder="https://example.com/hooks/harli", max_chars=2048)
        st.multiselect("Events", get_args(WebhookEvent)[:-1], key="webhook_events", placeholder="All of them")
        st.button("Create webhook", type="primary", icon=":material/webhook:", key="webhook_create", on_click=_create)


def _one(webhook: Webhook) -> None:
    with st.container(border=True, key=f"webhook_{webhook.id}"):
        st.markdown(f"`{webhook.url}` :gray[{plain(', '.join(webhook.events) or 'all events')}]")
        with st.container(horizontal=True):
            for label, icon, action in (
                ("Send a test", ":material/send:", "test"),
                ("Switch off" if webhook.enabled else "Switch on", ":material/power_settings_new:", "switch"),
            ):
                st.button(label, icon=icon, key=f"{action}_{webhook.id}", on_click=_act, args=(webhook, action))
            confirm(
                "Delete", f"Delete the webhook to **{plain(webhook.url)}**?", "Delete the webhook",
                lambda: _act(webhook, "delete"), key=f"delete_{webhook.id}",
            )  # fmt: skip
        with reading("the deliveries"):
            deliveries = client().webhook_deliveries(webhook.id, _SHOWN).items
        if deliveries:
            columns = [
                Column("When", "time"), Column("Event"), Column("Status", "badge"), Column("Attempts", end=True),
                Column("Answer", wide=True),
            ]  # fmt: skip
            table(columns, [_row(delivery) for delivery in deliveries], key=f"sent_{webhook.id}", openable=False)


def _row(delivery: Delivery) -> Row:
    tone = {"delivered": "good", "failed": "bad"}.get(delivery.status, "busy")
    answer = delivery.error or (str(delivery.response_status) if delivery.response_status else "–")
    return Row(
        str(delivery.id),
        (
            cell(delivery.created_at),
            Cell(delivery.event),
            Cell(delivery.status, tone=tone),  # type: ignore[arg-type]
            cell(delivery.attempts),
            Cell(answer),
        ),
    )


def _act(webhook: Webhook, action: str) -> None:
    calls = {
        "test": ("Testing", lambda: client().test_webhook(webhook.id)),
        "switch": ("Switching", lambda: client().update_webhook(webhook.id, enabled=not webhook.enabled)),
        "delete": ("Deleting", lambda: client().delete_webhook(webhook.id)),
    }
    doing, call = calls[action]
    attempt(f"{doing} the webhook to {webhook.url}", call, place="webhooks")


def _create() -> None:
    def send() -> None:
        made = client().create_webhook(st.session_state["webhook_url"].strip(), st.session_state["webhook_events"])
        st.session_state[_SECRET] = made.secret

    attempt("Creating the webhook", send, "Webhook created", place="webhooks")
