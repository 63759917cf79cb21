"""Targets: the latency that every decode step keeps, changed while everything runs; what each would give finetuning;
those of tenants and of the week; and what the guard did about it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal
from zoneinfo import ZoneInfo

import streamlit as st

from app.ui import charts, target_form, target_report
from app.ui import frontier as reading_off
from app.ui.background import Answer
from app.ui.data import REFRESH_S, client, forget, frontier, live, look_at_frontier, notices, telemetry
from app.ui.first import content_is_there
from app.ui.page import Fault, elsewhere, heading, reading, show_fault
from app.ui.states import badge
from app.ui.table import Cell, Column, Row, Tone, cell, table
from app.ui.text import ms, number, percent, plain, viewer_zone, when
from app.ui.theme import colours
from app.ui.tiles import Tile, tiles
from core.api.schemas import Engine, Frontier, Live, Notice, TargetBody, TargetInForce, Targets, TelemetryPoint
from core.client import Client
from core.errors import HarliError
from core.target_text import window_text

Kind = Literal["itl", "tpot", "ttft"]
_KINDS: dict[Kind, tuple[str, str]] = {
    "itl": ("ITL", "One gap between two tokens of a request; gaps that a prefill stretched are counted apart."),
    "tpot": ("TPOT", "A request's mean time per token after its first."),
    "ttft": ("TTFT", "From a request's arrival to its first token."),
}
_PERCENTILES = [50.0, 90.0, 95.0, 99.0, 99.9]
_READ = "_targets_read"
_STORED = "_targets_stored"
_FAULT = "_targets_fault"
_HOUR_S = 3600
_TOLD = ("guard", "guard_lifted", "targets")
_PICKED = "_frontier_picked"


def first_of(targets: list[TargetBody], kind: Kind) -> TargetBody | None:
    """The target that the form edits: the first one of the kind that is everyone's and always counts. All others have
    lines of their own below."""
    plain_ones = (target for target in targets if target.kind == kind and not target.tenant and not target.windows)
    return next(plain_ones, None)


def further(targets: list[TargetBody]) -> list[TargetBody]:
    return [target for target in targets if target is not first_of(targets, target.kind)]


def in_words(targets: list[TargetBody]) -> str:
    """``ITL p99 ≤ 96 ms, TTFT p99 ≤ 900 ms for acme``."""
    return ", ".join(map(words_of, targets)) or "no target"


def words_of(target: TargetBody | TargetInForce) -> str:
    whose = f" for {target.tenant}" if target.tenant else ""
    return f"{_KINDS[target.kind][0]} p{target.quantile * 100:g} ≤ {number(target.ms, 1)} ms{whose}"


def load(targets: Targets) -> None:
    """Put the stored targets into the form and remember their version; before the form is drawn in this run."""
    st.session_state[_READ] = targets
    for kind in _KINDS:
        target = first_of(targets.targets, kind)
        st.session_state[f"{kind}_on"] = target is not None
        st.session_state[f"{kind}_ms"] = target.ms if target else None
        st.session_state[f"{kind}_percentile"] = percentile_of(target)


def percentile_of(target: TargetBody | None) -> float:
    return round(target.quantile * 100, 4) if target else 99.0


def wanted() -> list[dict[str, Any]]:
    """What the form holds, as the API takes it; a target that is on without ms is sent as 0, which is refused."""
    read: Targets = st.session_state[_READ]
    form = [
        {
            "kind": kind,
            "ms": st.session_state[f"{kind}_ms"] or 0.0,
            "quantile": st.session_state[f"{kind}_percentile"] / 100,
        }
        for kind in _KINDS
        if st.session_state[f"{kind}_on"]
    ]
    return form + [target.model_dump() for target in further(read.targets)]


def save(version: int) -> None:
    """Store the form over `version`; a refusal leaves the form as it is."""
    st.session_state[_FAULT] = None
    try:
        st.session_state[_STORED] = client().set_targets(wanted(), version)
    except HarliError as error:
        st.session_state[_FAULT] = Fault("Changing the targets", error)
    finally:
        forget()


def take(targets: Targets) -> None:
    """Give up the form's values for the stored ones."""
    st.session_state[_STORED] = targets
    st.session_state[_FAULT] = None


def show_conflict(stored: Targets, read: Targets) -> None:
    """Someone else has changed the targets since the form read them: both values, and the choice."""
    mine = [TargetBody.model_construct(**target) for target in wanted()]
    st.warning(
        f"**The targets were changed elsewhere**, at {when(stored.updated_at)} (version {read.version} → "
        f"{stored.version}).  \nStored now: {plain(in_words(stored.targets))}  \nYour form: {plain(in_words(mine))}",
        icon=":material/call_split:",
    )
    with st.container(horizontal=True):
        take_theirs = st.button("Take the stored ones", key="take_theirs", on_click=take, args=(stored,))
        put_mine = st.button("Put mine over them", key="put_mine", on_click=save, args=(stored.version,))
    if take_theirs or put_mine:
        st.rerun()


def standing(stored: Targets, engine: Engine) -> str:
    """Whether the engine plans with what is stored."""
    if stored.applied_version == stored.version and engine.state == "ready":
        return badge(f":material/check_circle: version {stored.version} in force in the engine", "good")
    if engine.state != "ready":
        return badge(f"version {stored.version} waits for the engine", "warn")
    return badge(f"version {stored.version} on its way to the engine", "busy")


def explain(stored: Targets, engine: Engine) -> str:
    """Where the targets come from."""
    if stored.origin == "set":
        return f"Set at {when(stored.updated_at)}."
    target = first_of(stored.targets, "itl")
    if stored.origin == "measured" and target and engine.solo_itl_ms:
        return (
            f"The default: {number(target.ms / engine.solo_itl_ms, 1)} × the median ITL of {ms(engine.solo_itl_ms)} ms "
            "that the engine measured alone, at its start."
        )
    return "No target is set: finetuning takes what it can get."


def present(minute: TelemetryPoint, targets: list[TargetInForce]) -> list[Tile]:
    """The last minute's percentiles beside their targets."""
    figures: dict[Kind, tuple[float | None, float | None]] = {
        "itl": (minute.itl_p50_ms, minute.itl_p99_ms),
        "tpot": (minute.tpot_p50_ms, minute.tpot_p99_ms),
        "ttft": (minute.ttft_p50_ms, minute.ttft_p99_ms),
    }
    strip = []
    for kind, (p50, p99) in figures.items():
        of_kind = [target for target in targets if target.kind == kind and not target.tenant]
        # The figure is a p99, so that a target of that percentile is the one to hold it against.
        target = min(of_kind, key=lambda one: (one.quantile != 0.99, one.ms), default=None)
        comparable = target is not None and target.quantile == 0.99 and p99 is not None
        tone: Literal["", "good", "bad"] = ""
        if comparable and target is not None and p99 is not None:
            tone = "good" if p99 <= target.ms else "bad"
        note = f"p50 {ms(p50)} · {f'target {ms(target.ms)}' if target else 'no target'}"
        strip.append(Tile(f"{_KINDS[kind][0]} p99 now", ms(p99), "ms", note, tone, _KINDS[kind][1]))
    strip.append(Tile("Finetune", number(minute.finetune_tokens_s, 1), "tokens/s", "what the targets leave room for"))
    strip.append(Tile("Stalls by prefill", ms(minute.stall_p99_ms), "ms p99", "no part of the ITL"))
    return strip


@st.fragment(run_every=REFRESH_S)
def show_present() -> None:
    """The stored targets, whether they are in force, and the present percentiles."""
    with reading("the targets"):
        now: Live = live()
    read: Targets = st.session_state[_READ]
    st.markdown(f"{standing(now.targets, now.engine)} {plain(explain(now.targets, now.engine))}")
    # Each has its place whether the other is there or not: what comes for the inside of a block while the browser has
    # another element in the block's place ends the page.
    figures, notice = st.container(), st.container()
    if now.window is not None:
        with figures:
            tiles(present(now.window, now.targets.in_force), key="present", columns=5)
    if now.targets.version > read.version:
        with notice:
            show_conflict(now.targets, read)


def show_form() -> None:
    """One line per kind: whether it has a target, the ms, and the percentile that stays under them."""
    read: Targets = st.session_state[_READ]
    for kind, (name, meaning) in _KINDS.items():
        target = first_of(read.targets, kind)
        percentiles = sorted({*_PERCENTILES, percentile_of(target)})
        words, value, share = st.columns([1, 1.3, 1], vertical_alignment="center")
        on = words.toggle(f"**{name}**", target is not None, key=f"{kind}_on", bind="query-params", help=meaning)
        value.number_input(
            f"{name} target, ms", 0.0, 600_000.0, target.ms if target else None, 1.0, "%.1f", key=f"{kind}_ms",
            bind="query-params", placeholder="ms" if on else "no target", disabled=not on,
        )  # fmt: skip
        share.selectbox(
            "Percentile", percentiles, percentiles.index(percentile_of(target)), format_func=lambda p: f"p{p:g}",
            key=f"{kind}_percentile", bind="query-params", disabled=not on,
        )  # fmt: skip
    st.button(
        "Apply", type="primary", icon=":material/bolt:", key="apply_targets", on_click=save, args=(read.version,),
        shortcut="Ctrl+Enter",
    )  # fmt: skip
    if st.session_state.get(_FAULT):
        show_fault(st.session_state[_FAULT])


def replace(targets: list[TargetBody], version: int) -> None:
    """Store these targets over `version`."""
    st.session_state[_FAULT] = None
    try:
        st.session_state[_STORED] = client().set_targets(targets, version)
    except HarliError as error:
        st.session_state[_FAULT] = Fault("Changing the targets", error)
    finally:
        forget()


def counts_now(target: TargetBody, in_force: list[TargetInForce]) -> Cell:
    """Whether a target is among those in force, and why it is or is not."""
    key = (target.kind, target.ms, target.quantile, target.tenant)
    for one in in_force:
        if (one.kind, one.ms, one.quantile, one.tenant) == key:
            until = f"{one.reason}, until {when(one.until)}" if one.until else one.reason
            return Cell("in force", until, "good")
    return Cell("not now", "its windows are closed, or another one goes before it", "idle")


def attained_cell(target: TargetBody, attained: dict[str, float]) -> Cell:
    """The share of the last minute's gaps of a tenant's requests within its own ITL target."""
    share = attained.get(target.tenant or "") if target.kind == "itl" else None
    return Cell(f"{percent(share, 2)} %" if share is not None else "–", "last minute" if share is not None else "")


@st.fragment(run_every="5s")
def list_further() -> None:
    """Targets of tenants and by the week: what each is, whether it counts at this moment and why."""
    read: Targets = st.session_state[_READ]
    kept = further(read.targets)
    if kept:
        with reading("the targets"):
            now = live()
        attained = now.window.tenant_attainment if now.window is not None else {}
        columns = [
            Column("Target"), Column("Of"), Column("When", wide=True), Column("Now", "badge"),
            Column("Attained", end=True, wide=True),
        ]  # fmt: skip
        rows = [
            Row(
                str(index),
                (
                    cell(f"{_KINDS[target.kind][0]} p{target.quantile * 100:g} ≤ {number(target.ms, 1)} ms"),
                    cell(target.tenant or "everyone"),
                    cell("; ".join(window_text(window) for window in target.windows) or "always"),
                    counts_now(target, now.targets.in_force),
                    attained_cell(target, attained),
                ),
            )
            for index, target in enumerate(kept)
        ]
        table(columns, rows, key="further", openable=False)
    else:
        st.caption(
            "None. A target of a tenant counts for the requests that use the tenant's adapters, in place of everyone's "
            "of that kind; one with windows counts in that part of the week, in place of the one that always counts. A "
            "decode step obeys the tightest that applies to a request in it."
        )


def change_further() -> None:
    """Add a target that the form above does not know, or remove one."""
    read: Targets = st.session_state[_READ]
    kept = further(read.targets)
    with st.container(horizontal=True):
        with st.popover("Add a target", icon=":material/add:", key="add_target"):
            made = target_form.draw(tenants())
            if made is not None:
                st.button(
                    "Add", type="primary", key="add_target_now", on_click=replace,
                    args=([*read.targets, made], read.version),
                )  # fmt: skip
        if kept:
            with st.popover("Remove one", icon=":material/delete:", key="remove_target"):
                for index, target in enumerate(kept):
                    rest = [other for other in read.targets if other is not target]
                    st.button(
                        f"Remove {words_of(target)}", key=f"remove_target_{index}", on_click=replace,
                        args=(rest, read.version),
                    )  # fmt: skip


def tenants() -> list[str]:
    """The tenants that a target can be of, as far as the viewer knows them: an admin of the platform sees all, others
    by the adapters and targets that there are."""
    with reading("the tenants"):
        known = {tenant.name for tenant in client().tenants()}
        owners = {adapter.tenant for adapter in client().adapters(500).items}
    read: Targets = st.session_state[_READ]
    return sorted(known | owners | {target.tenant for target in read.targets if target.tenant})


def pick(value: float) -> None:
    """Put a target that was read off the frontier into the form."""
    st.session_state["itl_on"] = True
    st.session_state["itl_ms"] = round(value, 1)
    st.session_state[_PICKED] = round(value, 1)


def promise(found: Frontier, value: float) -> list[Tile]:
    """What a target would give, in figures."""
    now = found.now
    in_force = now is not None and abs(value - now.target_ms) < 0.05
    # The target in force was simulated itself; between the other points values are read off a line.
    there = now if now is not None and in_force else reading_off.at(found.points, value)
    gain = "as the target in force does" if in_force else ""
    if now is not None and now.finetune_tokens_s > 0 and not in_force:
        gain = f"{100 * (there.finetune_tokens_s / now.finetune_tokens_s - 1):+,.0f} % against the target in force"
    return [
        Tile("Finetune would get", number(there.finetune_tokens_s, 1), "tokens/s", gain, help="At the present load"),
        Tile("Of the whole device", percent(there.exclusive_share, 1), "%", "of finetuning without decode"),
        Tile("ITL would be", ms(there.itl_p50_ms), "ms p50", f"p99 {ms(there.itl_p99_ms)} ms"),
        Tile("Attained", percent(there.attainment, 2), "%", f"in layout {there.layout}"),
    ]


@st.fragment(run_every="5s")
def show_frontier() -> None:
    """What each ITL target would give finetuning at the load of this moment."""
    st.markdown("**What a target would give**")
    if not content_is_there("frontier"):
        return
    answer = frontier()
    found = answer.value
    if found is None:
        if answer.error is not None:
            show_fault(Fault("Asking the simulator", answer.error))
        else:
            st.caption(
                "Here stands what finetuning would get under other ITL targets. The simulator works it out for the "
                "present load; its first answer takes some seconds."
            )
        return
    if found.missing is not None or not found.points:
        st.caption(f"No figures: {plain(found.missing or 'the simulator gave none')}.")
        return
    low, high = found.points[0].target_ms, found.points[-1].target_ms
    start = found.now.target_ms if found.now is not None else (low + high) / 2
    if "frontier_ms" in st.session_state:
        st.session_state["frontier_ms"] = min(max(st.session_state["frontier_ms"], low), high)
    value = st.slider(
        "ITL target, ms", low, high, min(max(start, low), high), format="%.1f", key="frontier_ms",
        help="Move it to read what finetuning would get; nothing changes until it is applied below.",
    )  # fmt: skip
    tiles(promise(found, value), key="promise", columns=2)
    with reading("the live figures"):
        now = live()
    measured = None
    if found.now is not None and now.window is not None and now.jobs.get("running"):
        measured = (found.now.target_ms, round(now.window.finetune_tokens_s, 2))
    option = charts.frontier(found.points, colours(), chosen_ms=value, now=found.now, measured=measured)
    basis = {"profile": "this machine's profile", "learnt": "what the engine has measured of itself"}
    requests = f"{number(found.batch)} request{'' if found.batch == 1 else 's'}"
    note = f"tokens/s, simulated with {found.policy}, {requests}, from {basis.get(found.source, '')}"
    charts.chart("Finetune throughput against the target", option, key="frontier_chart", height=240, note=note)
    with st.container(horizontal=True, vertical_alignment="center"):
        st.button("Take it into the form", key="take_target", icon=":material/south:", on_click=pick, args=(value,))
        for told in found.notes:
            st.caption(plain(told))
    if st.session_state.pop(_PICKED, None) is not None:
        st.rerun()


@st.fragment(run_every="10s")
def show_past() -> None:
    """The past hour, and what the guard and the schedule did in it."""
    if not content_is_there("past"):
        return
    with reading("the past hour"):
        points = telemetry(_HOUR_S)
        told = notices(*_TOLD)
    option = charts.past(points, _HOUR_S, colours())
    charts.chart("The past hour", option, key="past", height=240, note="shaded: the guard held finetuning back")
    st.markdown("**What the guard and the schedule did**")
    if not told:
        st.caption(
            "Nothing yet. When gaps pass the target four times in twenty steps, the guard stops finetuning whatever "
            "the policy plans; its reason then stands here, and so does every change of the targets in force."
        )
        return
    columns = [Column("What", "badge"), Column("Why"), Column("When", "time")]
    table(columns, [told_row(notice) for notice in told[:15]], key="told", openable=False)


def report(api: Client, zone: ZoneInfo, look: Callable[[], Answer[Frontier]]) -> str:
    """All of the page as one HTML file, read when the download is pressed: in a thread that does not know the
    viewer."""
    told = api.notices(_TOLD, limit=50).items
    return target_report.html(api.live().targets, look().value, api.telemetry(_HOUR_S), told, datetime.now(UTC), zone)


def told_row(notice: Notice) -> Row:
    names: dict[str, tuple[str, Tone]] = {
        "guard": ("guard acts", "warn"), "guard_lifted": ("guard lets go", "good"), "targets": ("targets", "busy"),
    }  # fmt: skip
    name, tone = names[notice.code]
    return Row(str(notice.id), (Cell(name, tone=tone), cell(notice.message), cell(notice.time)))


heading("Targets", "Decode steps are planned so that the tightest target holds; the rest is finetuning's.")
if _READ not in st.session_state:
    with reading("the targets"):
        st.session_state[_READ] = client().targets()
if _STORED in st.session_state:
    load(st.session_state.pop(_STORED))
show_present()
left, right = st.columns(2, gap="medium")
with left, st.container(border=True):
    show_form()
with right, st.container(border=True):
    show_frontier()
with st.container(border=True):
    st.markdown("**Targets of tenants, and by the week**")
    list_further()
    change_further()
show_past()
st.download_button(
    "Download the report", partial(report, client(), viewer_zone(), look_at_frontier()), "harli-targets.html",
    "text/html", key="target_report", icon=":material/download:", on_click="ignore",
)  # fmt: skip
elsewhere(
    "harli targets show\nharli targets set itl=80 acme/itl=60 'itl=150 sat,sun Europe/Berlin'\n"
    "harli targets frontier\nharli notices --code guard",
    "curl {api}/api/targets\ncurl {api}/api/frontier\n"
    "curl -X PUT {api}/api/targets -H 'content-type: application/json' \\\n"
    '  -d \'{"version": 1, "targets": [{"kind": "itl", "ms": 80}]}\'',
)
