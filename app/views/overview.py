"""Overview: what the engine does this minute, against its target."""

from __future__ import annotations

import streamlit as st

from app.ui import charts
from app.ui.data import REFRESH_S, client, live, telemetry
from app.ui.first import content_is_there
from app.ui.page import heading, reading, teach
from app.ui.states import MEMORY_CODES, PART_TONES, badge, job_tone, progress_cell
from app.ui.table import Cell, Column, Row, Tone, cell, table
from app.ui.text import ms, number, percent, plain, when
from app.ui.theme import Colours, colours
from app.ui.tiles import BarPart, Tile, tiles
from core.api.schemas import Job, Live, Notice, Part, TargetInForce, TelemetryPoint

_WINDOWS = {"1 min": 60, "5 min": 300, "15 min": 900, "1 h": 3600}
_JOBS_SHOWN = 4
_NOTICES_SHOWN = 5
_ACTIVE = ("running", "starting", "saving", "queued")


def tightest(now: Live, kind: str) -> TargetInForce | None:
    """The target of the kind with the fewest ms, of those in force for everyone."""
    of_kind = (target for target in now.targets.in_force if target.kind == kind and not target.tenant)
    return min(of_kind, key=lambda target: target.ms, default=None)


def figures(minute: TelemetryPoint, second: TelemetryPoint, target: TargetInForce | None) -> list[Tile]:
    """The strip of figures: of the last minute, but batch and KV cache, which are of this second."""
    p99, attained = minute.itl_p99_ms, minute.attainment
    kv_share = second.kv_used / second.kv_total if second.kv_total else 0.0
    return [
        Tile("ITL p50", ms(minute.itl_p50_ms), "ms", "last minute", help="Half of the decode gaps are shorter"),
        Tile(
            "ITL p99",
            ms(p99),
            "ms",
            f"target {ms(target.ms)} ms" if target else "no target set",
            "" if p99 is None or target is None else "good" if p99 <= target.ms else "bad",
            "99 % of the last minute's decode gaps are shorter; stalls by prefill are counted apart",
        ),
        Tile(
            "Attainment",
            percent(attained, 2),
            "%",
            "of gaps within target",
            "" if attained is None or target is None else "good" if attained >= target.quantile else "bad",
            "Share of the last minute's decode gaps that kept the tightest ITL target",
        ),
        Tile("Decode", number(minute.decode_tokens_s, 1), "tokens/s", f"{second.running} running"),
        Tile("Finetune", number(minute.finetune_tokens_s, 1), "tokens/s", second.paused_reason or "last minute"),
        Tile(
            "Batch", number(second.batch, 1), "requests", f"{second.waiting} waiting", help="Requests per decode step"
        ),
        Tile(
            "Device in use",
            percent(minute.busy_share),
            "%",
            f"time: decode {percent(minute.decode_share)} %, finetune {percent(minute.finetune_share)} %",
            help="How much of the device was in use in the last minute, on average; and the share of the minute in "
            "which decode steps, and finetuning, ran on it"
            + (f". It drew {number(minute.power_w)} W" if minute.power_w is not None else ""),
            bar=(BarPart(minute.decode_share, "decode"), BarPart(minute.finetune_share, "finetune")),
        ),
        Tile(
            "KV cache",
            percent(kv_share),
            "%",
            f"{number(second.kv_used)} / {number(second.kv_total)} tokens",
            help="Tokens held in the KV cache, of those that fit",
            bar=(BarPart(kv_share),),
        ),
        Tile(
            "Stalls by prefill",
            ms(minute.stall_p99_ms),
            "ms p99",
            "apart from the ITL",
            help="Gaps that the prefill of a new request stretched",
        ),
        Tile("TTFT", ms(minute.ttft_p99_ms), "ms p99", f"p50 {ms(minute.ttft_p50_ms)} ms", help="Time to first token"),
    ]


def show_plan(second: TelemetryPoint) -> None:
    """The plan in force, in words."""
    with st.container(border=True):
        st.markdown(
            "**Plan in force**",
            help="The policy that plans, and how it divides the device. A tasklet is the smallest piece of finetuning: "
            "one layer forward or backward, the head, the optimizer; beside: while a decode step runs; after: in the "
            "time that is left until the next one.",
        )
        st.markdown(f"`{second.plan or 'none'}`")
        st.caption(
            f"{number(second.plan_after, 1)} tasklets after and {number(second.plan_beside, 1)} beside a decode step, "
            "on average"
        )
        if second.plan_reason:
            st.markdown(plain(second.plan_reason))
        if second.paused_reason and second.paused_reason != second.plan_reason:
            st.warning(f"Finetuning pauses: {plain(second.paused_reason)}", icon=":material/pause_circle:")


def show_alerts(now: Live) -> None:
    """What is wrong: alerts that fire, the engine or another part that is away, the guard while it acts."""
    for alert in now.alerts:
        if alert.state == "firing":
            box = st.error if alert.severity == "critical" else st.warning
            box(
                f"**Alert {plain(alert.rule)}** since {when(alert.fired_at)}: {plain(alert.message)}",
                icon=":material/notifications_active:",
            )
    if now.engine.state == "lost":
        st.error(
            "**The engine fell silent.** Its job is resumed from the last checkpoint when it is back; `harli doctor` "
            "says what the machine lacks.",
            icon=":material/error:",
        )
    for part in now.parts:
        if part.state in ("backing_off", "failed"):
            doing = "starts again soon" if part.state == "backing_off" else "is not started again"
            st.warning(
                f"**{part.name} crashed and {doing}** (restarted {part.restarts} times). {plain(part.message)}",
                icon=":material/warning:",
            )
    guard = next((notice for notice in reversed(now.engine.notices) if notice.code.startswith("guard")), None)
    if guard is not None and guard.code == "guard":
        st.warning(f"**The guard acts**, since {when(guard.time)}: {plain(guard.message)}", icon=":material/shield:")


def show_notices(notices: list[Notice]) -> None:
    """The last that the engine had to say about itself, newest first. What memory changed hands is on its own page."""
    told = [notice for notice in notices if notice.code not in MEMORY_CODES][-_NOTICES_SHOWN:]
    if told:
        st.markdown("**Notices**")
        tones: dict[str, Tone] = {"info": "idle", "warning": "warn", "error": "bad"}
        rows = [
            Row(
                f"{notice.time.isoformat()} {notice.code}",
                (
                    Cell(notice.code.replace("_", " "), tone=tones[notice.level]),
                    cell(notice.message),
                    cell(notice.time),
                ),
            )
            for notice in reversed(told)
        ]
        table(
            [Column("Notice", "badge"), Column("What"), Column("When", "time", wide=True)],
            rows,
            key="notices",
            openable=False,
        )


def part_row(part: Part) -> Row:
    return Row(
        part.name,
        (
            Cell(part.name),
            Cell(part.state.replace("_", " "), part.message, PART_TONES[part.state]),
            cell(part.restarts),
            cell(part.since),
        ),
    )


def show_parts(parts: list[Part]) -> None:
    st.markdown("**Parts**")
    if not parts:
        st.caption("Harli was not started by `harli up`, so that nothing supervises its processes.")
        return
    columns = [
        Column("Part"),
        Column("State", "badge"),
        Column("Restarts", end=True, wide=True),
        Column("Since", "time", wide=True),
    ]
    table(columns, [part_row(part) for part in parts], key="parts", openable=False)


def show_job(job: Job) -> None:
    """A line for a job. Its link is followed in the browser, which first ends the page's refreshes; a switch from here
    would race with them."""
    steps = progress_cell(job)
    with st.container(border=True, gap="xsmall", key=f"job_{job.id}"):
        with st.container(horizontal=True, vertical_alignment="center", gap="small"):
            st.markdown(badge(job.state, job_tone(job.state)), width="content")
            st.page_link("views/jobs.py", label=plain(job.name), query_params={"job": job.id})
        if job.waiting_reason:
            st.caption(plain(job.waiting_reason))
        else:
            st.caption(f"step {steps.text} · loss {number(job.loss, 3)}")
        if steps.share is not None:
            st.progress(min(steps.share, 1.0))


def show_jobs() -> None:
    """Jobs that run or wait."""
    jobs = [job for job in client().jobs(limit=50).items if job.state in _ACTIVE]
    jobs.sort(key=lambda job: _ACTIVE.index(job.state))
    st.markdown("**Jobs that run or wait**")
    if not jobs:
        st.caption("None. Submit one on the Jobs page: it trains in what decode leaves idle.")
    for job in jobs[:_JOBS_SHOWN]:
        show_job(job)
    if len(jobs) > _JOBS_SHOWN:
        st.caption(f"and {len(jobs) - _JOBS_SHOWN} more on the Jobs page")


@st.cache_data(ttl=REFRESH_S * 0.9, show_spinner=False, max_entries=16)
def options(seconds: int, palette: Colours, target_ms: float | None) -> dict[str, charts.Option]:
    """The charts of one refresh; made once however many tabs are open."""
    points = telemetry(seconds)
    return {
        "latency": charts.latency(points, seconds, palette, target_ms),
        "throughput": charts.throughput(points, seconds, palette),
        "device": charts.device(points, seconds, palette),
        "stalls": charts.stalls(points, seconds, palette),
        "load": charts.load(points, seconds, palette),
        "kv_cache": charts.kv_cache(points, seconds, palette),
    }


@st.fragment(run_every=REFRESH_S)
def show_live(seconds: int) -> None:
    """Everything that moves. Each chart and strip keeps its key, so that it is updated in place."""
    with reading("the live figures"):
        now = live()
    show_alerts(now)
    if now.engine.state == "absent" or now.now is None or now.window is None:
        teach(
            "Nothing is served yet",
            "The figures of decode and finetuning appear here as soon as the engine is ready. Loading the model takes "
            "some seconds to minutes; the parts below say how far it is.",
            "harli up        # API, engine and console as one group\nharli doctor    # what the machine has and lacks",
            "curl {api}/api/engine",
        )
        show_parts(now.parts)
        return
    target = tightest(now, "itl")
    tiles(figures(now.window, now.now, target), key="figures", columns=5)
    if not content_is_there("overview"):
        return
    with reading("the last minutes"):
        drawn = options(seconds, colours(), target.ms if target else None)
    main, side = st.columns([2.3, 1], gap="medium")
    with main:
        charts.chart("Inter-token latency", drawn["latency"], key="latency", height=250, note="ms, decode only")
        left, right = st.columns(2, gap="medium")
        with left:
            charts.chart("Throughput", drawn["throughput"], key="throughput", note="tokens/s")
        with right:
            charts.chart("Device time", drawn["device"], key="device", note="%")
        left, middle, right = st.columns(3, gap="medium")
        with left:
            charts.chart("Stalls and first tokens", drawn["stalls"], key="stalls", height=180, note="ms")
        with middle:
            charts.chart("Batch", drawn["load"], key="load", height=180, note="requests")
        with right:
            charts.chart("KV cache", drawn["kv_cache"], key="kv_cache", height=180, note="% in use")
    with side:
        show_plan(now.now)
        with reading("the jobs"):
            show_jobs()
        show_parts(now.parts)
        show_notices(now.engine.notices)


heading("Overview", "Decode against its latency target, and the finetuning that runs in what decode leaves idle.")
window = st.segmented_control(
    "Time shown", list(_WINDOWS), default="5 min", required=True, key="window", bind="query-params",
    label_visibility="collapsed",
)  # fmt: skip
show_live(_WINDOWS[window])
