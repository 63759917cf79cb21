"""Schedules: jobs that are submitted by cron."""

from __future__ import annotations

from typing import get_args

import streamlit as st

from app.ui.data import all_datasets, client
from app.ui.page import attempt, confirm, reading, show_faults, teach
from app.ui.text import plain, viewer_zone, when
from core.api.job_schemas import Schedule
from core.api.schemas import Preset


def draw() -> None:
    with reading("the schedules"):
        schedules = client().schedules().items
        datasets = list(dict.fromkeys(dataset.name for dataset in all_datasets()))
    show_faults("schedules")
    if not schedules:
        teach(
            "No schedule yet",
            "A schedule submits a job by cron, each time on the newest version of a data set: finetuning that goes on "
            "while the data set grows. Fill in the form below.",
            "harli schedules create nightly --cron '0 2 * * *' --dataset my-rows --adapter support-bot --continued",
            "curl {api}/api/schedules -H 'content-type: application/json' \\\n"
            '  -d \'{"name": "nightly", "cron": "0 2 * * *", "continued": true,\n'
            '       "job": {"dataset": "my-rows", "adapter_name": "support-bot"}}\'',
        )
    for schedule in schedules:
        _one(schedule)
    with st.expander("New schedule", expanded=not schedules, icon=":material/add:"):
        _new(datasets)


def _one(schedule: Schedule) -> None:
    with st.container(border=True, key=f"schedule_{schedule.id}"):
        with st.container(horizontal=True, vertical_alignment="center"):
            st.markdown(f"**{plain(schedule.name)}** `{schedule.cron}` {plain(schedule.timezone)}")
            following = f"next {when(schedule.next_run_at)}" if schedule.next_run_at else "switched off"
            st.caption(f"{schedule.job.dataset} → {schedule.job.adapter_name} · {following}", width="content")
        if schedule.last_message:
            st.caption(f"Last run, {when(schedule.last_run_at)}: {plain(schedule.last_message)}")
        with st.container(horizontal=True):
            _button("Run now", ":material/play_arrow:", schedule, "run")
            switch = "Switch off" if schedule.enabled else "Switch on"
            _button(switch, ":material/power_settings_new:", schedule, "switch")
            if schedule.last_job_id:
                st.page_link(
                    "views/jobs.py", label="Last job", icon=":material/model_training:",
                    query_params={"job": schedule.last_job_id},
                )  # fmt: skip
            confirm(
                "Delete", f"Delete **{plain(schedule.name)}**? Its jobs stay.", "Delete the schedule",
                lambda: _act(schedule, "delete"), key=f"delete_{schedule.id}",
            )  # fmt: skip


def _button(label: str, icon: str, schedule: Schedule, action: str) -> None:
    st.button(label, icon=icon, key=f"{action}_{schedule.id}", on_click=_act, args=(schedule, action))


def _act(schedule: Schedule, action: str) -> None:
    calls = {
        "run": ("Running", lambda: client().run_schedule(schedule.id)),
        "switch": ("Switching", lambda: client().update_schedule(schedule.id, enabled=not schedule.enabled)),
        "delete": ("Deleting", lambda: client().delete_schedule(schedule.id)),
    }
    doing, call = calls[action]
    attempt(f"{doing} the schedule {schedule.name}", call, place="schedules")


def _new(datasets: list[str]) -> None:
    left, right = st.columns(2, gap="large")
    with left:
        st.text_input("Name", key="schedule_name", max_chars=120, placeholder="nightly")
        st.selectbox(
            "Data set", datasets, index=None, key="schedule_dataset", placeholder="Its newest version each time"
        )
        st.text_input("Adapter name", key="schedule_adapter", max_chars=63, placeholder="support-bot")
        st.selectbox("Preset", get_args(Preset), index=1, key="schedule_preset")
    with right:
        st.text_input("Cron", "0 2 * * *", key="schedule_cron", help="minute hour day month weekday")
        st.text_input("Time zone", str(viewer_zone()), key="schedule_zone")
        st.toggle(
            "Go on from the last adapter", key="schedule_continued",
            help="Each run starts from the adapter's newest version instead of the base model",
        )  # fmt: skip
        st.toggle("Only when there is new data", key="schedule_new_data")
    st.button("Create schedule", type="primary", icon=":material/schedule:", key="schedule_create", on_click=_create)


def _create() -> None:
    state = st.session_state
    job = {
        "dataset": state["schedule_dataset"] or "",
        "adapter_name": state["schedule_adapter"].strip(),
        "preset": state["schedule_preset"],
    }

    def send() -> None:
        client().create_schedule(
            state["schedule_name"].strip(),
            state["schedule_cron"].strip(),
            job,
            timezone=state["schedule_zone"].strip(),
            continued=state["schedule_continued"],
            only_new_data=state["schedule_new_data"],
        )

    attempt("Creating the schedule", send, "Schedule created", place="schedules")
