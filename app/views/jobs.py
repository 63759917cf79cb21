"""Jobs: the queue, a new job, several side by side, schedules and webhooks, and one job in detail (``?job=``)."""

from __future__ import annotations

from typing import Any, Literal, get_args

import streamlit as st

from app.ui import job_compare, job_detail, job_form, schedules, webhooks
from app.ui.data import client
from app.ui.job_detail import PLACES
from app.ui.page import attempt, heading, reading, show_faults, teach
from app.ui.paging import ROWS, leaf_through
from app.ui.sending import lead_to
from app.ui.states import WAITING, progress_cell, state_cell
from app.ui.table import Cell, Column, Row, cell, table
from app.ui.text import number, plain
from core.api.schemas import Job, JobState

_COLUMNS = [
    Column("Job"), Column("State", "badge"), Column("Steps"), Column("Loss", end=True, wide=True),
    Column("Data set", wide=True), Column("Adapter", wide=True), Column("Priority", end=True, wide=True),
    Column("Submitted", "time", wide=True),
]  # fmt: skip
_ORDERED = 50


def row(job: Job) -> Row:
    adapter = f"{job.adapter_name}@{job.adapter_version}" if job.adapter_version else job.adapter_name
    return Row(
        job.id,
        (
            cell(job.name),
            state_cell(job),
            progress_cell(job),
            Cell(number(job.loss, 3)),
            cell(job.dataset_name),
            cell(adapter),
            cell(job.priority),
            cell(job.created_at),
        ),
    )


def _move(job: Job, to: Literal["up", "down", "top", "bottom"]) -> None:
    attempt("Moving the job", lambda: client().move_job(job.id, to), place="order")


def order() -> None:
    """The waiting jobs as they will run, to be put into another order; nothing while at most one waits."""
    with reading("the queue"):
        waiting = [job for job in client().job_queue(_ORDERED) if job.state in WAITING]
    if len(waiting) < 2:
        return
    with st.expander(f"Order of {len(waiting)} waiting jobs", icon=":material/swap_vert:", key="order"):
        show_faults("order")
        for place, job in enumerate(waiting, 1):
            with st.container(horizontal=True, vertical_alignment="center"):
                for to, icon in PLACES.items():
                    end = place == 1 if to in ("top", "up") else place == len(waiting)
                    st.button(
                        to.capitalize(), icon=icon, key=f"{to}_{job.id}", type="tertiary",
                        on_click=_move, args=(job, to), disabled=end,
                    )  # fmt: skip
                st.markdown(f"{place}. **{plain(job.name)}** :gray[priority {job.priority}]")


@st.fragment(run_every="2s")
def queue() -> None:
    """The jobs of the chosen state; above them, drawn after them, the order of those that wait."""
    above = st.container()
    listing()
    with above:
        order()


def listing() -> None:
    """Newest first, a page at a time."""
    states = ["all", *get_args(JobState)]
    with st.container(horizontal=True, vertical_alignment="bottom"):
        chosen = st.selectbox("State", states, key="state", bind="query-params", width=180)
        state: Any = None if chosen == "all" else chosen
        with reading("the jobs"):
            jobs = leaf_through("jobs", lambda cursor: client().jobs(state, ROWS, cursor), of=chosen)
    if not jobs:
        if chosen != "all":
            st.caption(f"No job is {chosen} now; `all` shows those in every state.")
            return
        teach(
            "No job yet",
            "A job trains a LoRA adapter on a data set in the time that decode leaves idle, and the latency target is "
            "kept meanwhile. Press **New job** above, choose a data set and a name, and submit.",
            "harli submit --dataset my-rows.jsonl --adapter support-bot --watch\nharli jobs list",
            "curl {api}/api/jobs -H 'content-type: application/json' \\\n"
            '  -d \'{"dataset": "my-rows", "adapter_name": "support-bot"}\'',
        )
        return
    pressed = table(_COLUMNS, [row(job) for job in jobs], key="queue")
    if pressed:
        st.query_params["job"] = pressed
        st.rerun()


made = job_form.submitted()
if made is not None and st.query_params.get("job") == made:
    job_form.opened()
    made = None
if "job" in st.query_params:
    with reading("the job"):
        found = client().job(st.query_params["job"])
    job_detail.draw(found)
else:
    heading("Jobs", "Finetuning of LoRA adapters, run in what decode leaves idle.")
    view = st.segmented_control(
        "View", ["Queue", "New job", "Compare", "Schedules", "Webhooks"], default="Queue", required=True, key="view",
        bind="query-params", label_visibility="collapsed",
    )  # fmt: skip
    if view == "New job":
        job_form.draw(renew=made is None)
    else:
        {"Queue": queue, "Compare": job_compare.draw, "Schedules": schedules.draw, "Webhooks": webhooks.draw}[view]()
if made is not None:
    lead_to("job", made)
