"""One job: its figures, loss, events, log and settings, and what can be done with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from typing import Literal

import streamlit as st

from app.ui import charts, job_form
from app.ui.data import REFRESH_S, client, log_of, metrics_of, signed_in_with
from app.ui.page import attempt, reading, show_faults
from app.ui.states import ENDED, PAUSABLE, RESUMABLE, WAITING, badge, job_tone, remaining, seconds_per_step
from app.ui.table import Cell, Column, Row, cell, table
from app.ui.text import number, plain, when
from app.ui.theme import colours
from app.ui.tiles import BarPart, Tile, tiles
from core.api.job_schemas import JobOutlook, JobSample
from core.api.schemas import Job, JobEvent, JobLogLine, JobMetric

_LOG_LINES = 500
_OUTLOOK_S = 3.0
# Where a waiting job can be moved to, with the icon of it.
PLACES: dict[Literal["top", "up", "down", "bottom"], str] = {
    "top": ":material/vertical_align_top:", "up": ":material/arrow_upward:", "down": ":material/arrow_downward:",
    "bottom": ":material/vertical_align_bottom:",
}  # fmt: skip


def draw(job: Job) -> None:
    """The job's page. It is drawn anew when the job's state changes; its figures refresh by themselves."""
    with st.container(horizontal=True, vertical_alignment="center"):
        st.button("All jobs", icon=":material/arrow_back:", type="tertiary", on_click=_close, key="all_jobs")
        st.markdown(f"`{job.id}`")
    st.title(plain(job.name), anchor=False)
    _lineage(job)
    _actions(job)
    show_faults()
    if job.error:
        where = f" · field `{job.error.param}`" if job.error.param else ""
        st.error(f"{plain(job.error.message)}  \n`{job.error.code}`{where}", icon=":material/error:")
    if job.state in ENDED:
        _figures(job.id, job.state)
    else:
        st.fragment(_figures, run_every=REFRESH_S)(job.id, job.state)


def _close() -> None:
    st.session_state["view"] = "Queue"
    st.query_params.pop("job", None)


def _lineage(job: Job) -> None:
    trained = f"{job.adapter_name}@{job.adapter_version}" if job.adapter_version else job.adapter_name
    with st.container(horizontal=True, vertical_alignment="center", gap="medium"):
        st.markdown(badge(job.state, job_tone(job.state)), width="content")
        st.page_link(
            "views/datasets.py", label=f"data set {job.dataset_name}", icon=":material/database:",
            query_params={"dataset": job.dataset_id},
        )  # fmt: skip
        st.page_link(
            "views/adapters.py", label=f"adapter {trained}", icon=":material/extension:",
            query_params={"adapter": job.adapter_name}, disabled=job.adapter_version is None,
        )  # fmt: skip
        times = [
            ("submitted", job.created_at), ("started", job.started_at), ("ended", job.ended_at),
            ("deadline", job.deadline),
        ]  # fmt: skip
        facts = [f"{word} {when(time)}" for word, time in times if time]
        if job.spec.base_model is not None:
            facts.insert(0, f"base {plain(job.spec.base_model)}")
        st.caption(" · ".join(facts), width="content")


def _actions(job: Job) -> None:
    """All that can be done with a job; what its state forbids is disabled. Nothing moves when the state changes, so
    that a press meets what it was aimed at."""
    ended = job.state in ENDED
    with st.container(horizontal=True):
        st.button(
            "Pause", icon=":material/pause:", key="pause", on_click=_act, args=("Pausing", "pause", job),
            disabled=job.state not in PAUSABLE,
        )  # fmt: skip
        st.button(
            "Resume", icon=":material/play_arrow:", key="resume", on_click=_act, args=("Resuming", "resume", job),
            disabled=job.state not in RESUMABLE,
        )  # fmt: skip
        with st.popover("Stop", icon=":material/stop:", key="stop_ask", disabled=ended):
            st.markdown(f"End **{plain(job.name)}** now?")
            st.button(
                "Stop and keep the adapter", icon=":material/save:", key="stop_save", on_click=_act,
                args=("Stopping", "stop_save", job), help="The adapter is stored as it stands now",
            )  # fmt: skip
            st.button(
                "Stop and discard", type="primary", icon=":material/delete:", key="stop_discard", on_click=_act,
                args=("Stopping", "stop", job), help="What was learned is thrown away",
            )  # fmt: skip
        with st.popover("Priority", icon=":material/low_priority:", key="priority_ask", disabled=ended):
            st.number_input("Priority (higher runs earlier)", -100, 100, job.priority, key="priority")
            st.button("Set priority", key="priority_set", on_click=_act, args=("Reordering", "priority", job))
            st.caption("Place among the waiting jobs")
            with st.container(horizontal=True):
                for place, icon in PLACES.items():
                    st.button(
                        place.capitalize(), icon=icon, key=f"move_{place}", on_click=_act,
                        args=("Moving", f"move_{place}", job), disabled=job.state not in WAITING,
                    )  # fmt: skip
        st.button("Clone", icon=":material/content_copy:", key="clone", on_click=_clone, args=(job,))
        with st.popover("Delete", icon=":material/delete:", key="delete_ask", disabled=not ended):
            st.markdown("Forget this job, with its figures and checkpoints? The adapter that it made stays.")
            st.button("Delete the job", type="primary", key="delete_job", on_click=_delete, args=(job,))


def _act(doing: str, action: str, job: Job) -> None:
    calls: dict[str, Callable[[], object]] = {
        "pause": lambda: client().pause_job(job.id),
        "resume": lambda: client().resume_job(job.id),
        "stop": lambda: client().stop_job(job.id, save=False),
        "stop_save": lambda: client().stop_job(job.id, save=True),
        "priority": lambda: client().update_job(job.id, priority=int(st.session_state["priority"])),
        **{f"move_{place}": partial(client().move_job, job.id, place) for place in PLACES},
    }
    attempt(f"{doing} the job", calls[action], f"{doing} {job.name}")


def _delete(job: Job) -> None:
    if attempt("Deleting the job", lambda: client().delete_job(job.id), f"{job.name} is deleted"):
        _close()


def _clone(job: Job) -> None:
    job_form.fill(job_form.fields_of(job))
    _close()
    st.session_state["view"] = "New job"


def _tiles(job: Job, metrics: list[JobMetric]) -> list[Tile]:
    per_step = seconds_per_step(metrics)
    done = job.step / job.total_steps if job.total_steps else 0.0
    fell = f"from {number(job.first_loss, 3)}" if job.first_loss is not None else "of the newest step"
    return [
        Tile(
            "Step", number(job.step), f"of {number(job.total_steps)}" if job.total_steps else "",
            f"epoch {number(job.epoch, 2)}", bar=(BarPart(done, "finetune"),),
        ),
        Tile("Time left", remaining(job, metrics), "", f"{number(per_step, 2)} s per step" if per_step else ""),
        Tile("Loss", number(job.loss, 3), "", fell),
        Tile("Evaluation loss", number(job.eval_loss, 3), "", _best(job)),
        Tile("Tokens trained", number(job.tokens), "", "padding not counted"),
        Tile("Resumed", number(job.resumes), "times" if job.resumes != 1 else "time", f"priority {job.priority}"),
    ]  # fmt: skip


def _best(job: Job) -> str:
    if job.best_step is None:
        return "on held-out rows"
    return f"lowest {number(job.best_loss, 3)} at step {job.best_step}"


@st.cache_data(ttl=_OUTLOOK_S, show_spinner=False, max_entries=256)
def _outlook(token: str | None, job_id: str, state: str) -> JobOutlook:
    """Why a job is where it is; it adds up minutes of figures, and changes more slowly than they do."""
    return client().job_outlook(job_id)


def _why(outlook: JobOutlook) -> None:
    """Why it is where it is, and when it ends."""
    if outlook.state in ENDED:
        return
    lines = [f"**{plain(outlook.headline.capitalize())}**", *(plain(reason) for reason in outlook.reasons)]
    if outlook.position is not None:
        lines.append(f"Number {outlook.position} in the queue")
    if outlook.eta is not None:
        lines.append(f"It ends about {when(outlook.eta)}")
    text = "  \n".join(lines)
    if outlook.late:
        st.warning(text, icon=":material/alarm:")
    elif outlook.state in WAITING or outlook.state == "paused" or "stands still" in outlook.headline:
        st.info(text, icon=":material/hourglass_top:")
    else:
        st.markdown(f":small[{' · '.join(lines)}]")


def _samples(samples: Sequence[JobSample]) -> None:
    """What the adapter answered, the newest step first."""
    if not samples:
        st.caption("A job with prompts to try (expert settings) has its answers here after each evaluation.")
    steps = sorted({sample.step for sample in samples}, reverse=True)
    for step in steps:
        st.markdown(f"**Step {step}**")
        for sample in samples:
            if sample.step == step:
                st.markdown(f":gray[{plain(sample.prompt)}]  \n{plain(sample.answer)}")


def _figures(job_id: str, drawn_state: str) -> None:
    """What moves while a job runs."""
    with reading("the job"):
        job, outlook = client().job(job_id), _outlook(signed_in_with(), job_id, drawn_state)
        metrics, events = metrics_of(job_id), client().job_events(job_id)
    if job.state != drawn_state:
        st.rerun()
    _why(outlook)
    tiles(_tiles(job, metrics), key="job_figures", columns=6)
    left, right = st.columns([2, 1], gap="medium")
    with left:
        if metrics:
            charts.chart("Loss", charts.loss(metrics, job.total_steps, colours()), key="loss", height=300)
        else:
            st.markdown("**Loss**")
            st.caption("The first point comes with the first optimizer step.")
    with right:
        st.markdown("**Events**")
        with st.container(height=310, border=False):
            columns = [Column("When", "time"), Column("What")]
            table(columns, [_event(event) for event in reversed(events)], key="events", openable=False)
    # What is not looked at is neither read nor drawn, refresh for refresh.
    shown, said, learning, given = st.tabs(
        ["Log", "Samples", "Learning rate and gradients", "Settings"], key="job_tabs", on_change="rerun"
    )
    if shown.open:
        with shown, reading("the log"):
            _log(log_of(job_id, _LOG_LINES))
    if said.open:
        with said, reading("the samples"):
            _samples(client().job_samples(job_id) if job.spec.sample_prompts else [])
    if learning.open:
        with learning:
            _learning(metrics, job.total_steps)
    if given.open:
        with given:
            st.json(job.spec.model_dump(mode="json", exclude_none=True), expanded=True)


def _log(lines: Sequence[JobLogLine]) -> None:
    """The last lines, plain: what colours code is a large script, which a log does not need."""
    text = "\n".join(f"{when(line.time)}  {line.message}" for line in lines)
    with st.container(height=260, autoscroll=True):
        st.html(f'<pre class="log">{escape(text) or "Nothing is logged yet."}</pre>')


def _learning(metrics: Sequence[JobMetric], total_steps: int | None) -> None:
    rate, norm = st.columns(2, gap="medium")
    with rate:
        charts.chart("Learning rate", charts.learning_rate(metrics, total_steps, colours()), key="learning_rate")
    with norm:
        charts.chart("Gradient norm", charts.gradient_norm(metrics, total_steps, colours()), key="gradient_norm")


def _event(event: JobEvent) -> Row:
    change = f"{event.from_state} → {event.to_state}" if event.from_state else event.to_state or event.kind
    change = change.replace("_", " ")
    return Row(str(event.id), (cell(event.time), Cell(change, event.message)))
