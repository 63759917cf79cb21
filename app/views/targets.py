"""Targets: the latency that every decode step keeps, changed while everything runs."""

from __future__ import annotations

from typing import Any, Literal

import streamlit as st

from app.ui.data import REFRESH_S, client, forget, live
from app.ui.page import Fault, elsewhere, heading, reading, show_fault
from app.ui.states import badge
from app.ui.text import ms, number, plain, when
from app.ui.tiles import Tile, tiles
from core.api.schemas import Engine, Live, TargetBody, Targets, TelemetryPoint
from core.errors import HarliError

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


def first_of(targets: list[TargetBody], kind: Kind) -> TargetBody | None:
    """The target that the form edits; further ones of a kind come over the API and are kept as they are."""
    return next((target for target in targets if target.kind == kind), None)


def further(targets: list[TargetBody]) -> list[TargetBody]:
    return [target for target in targets if target is not first_of(targets, target.kind)]


def in_words(targets: list[TargetBody]) -> str:
    """``ITL p99 ≤ 96 ms, TTFT p99 ≤ 900 ms``."""
    parts = [f"{_KINDS[t.kind][0]} p{t.quantile * 100:g} ≤ {number(t.ms, 1)} ms" for t in targets]
    return ", ".join(parts) or "no target"


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


def present(minute: TelemetryPoint, targets: list[TargetBody]) -> list[Tile]:
    """The last minute's percentiles beside their targets."""
    figures: dict[Kind, tuple[float | None, float | None]] = {
        "itl": (minute.itl_p50_ms, minute.itl_p99_ms),
        "tpot": (minute.tpot_p50_ms, minute.tpot_p99_ms),
        "ttft": (minute.ttft_p50_ms, minute.ttft_p99_ms),
    }
    strip = []
    for kind, (p50, p99) in figures.items():
        target = first_of(targets, kind)
        comparable = target is not None and target.quantile == 0.99 and p99 is not None
        tone: Literal["", "good", "bad"] = ""
        if comparable and target is not None and p99 is not None:
            tone = "good" if p99 <= target.ms else "bad"
        note = f"p50 {ms(p50)} · target {ms(target.ms) if target else '–'}"
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
    if now.window is not None:
        tiles(present(now.window, now.targets.targets), key="present", columns=5)
    if now.targets.version > read.version:
        show_conflict(now.targets, read)


def show_form() -> None:
    """One line per kind: whether it has a target, the ms, and the percentile that stays under them."""
    read: Targets = st.session_state[_READ]
    for kind, (name, meaning) in _KINDS.items():
        target = first_of(read.targets, kind)
        percentiles = sorted({*_PERCENTILES, percentile_of(target)})
        words, value, share = st.columns([2, 1, 1], vertical_alignment="center")
        on = words.toggle(
            f"**{name}** :small[:gray[{meaning}]]", target is not None, key=f"{kind}_on", bind="query-params"
        )
        value.number_input(
            f"{name} target, ms", 0.0, 600_000.0, target.ms if target else None, 1.0, "%.1f", key=f"{kind}_ms",
            bind="query-params", placeholder="ms" if on else "no target", disabled=not on,
        )  # fmt: skip
        share.selectbox(
            "Percentile", percentiles, percentiles.index(percentile_of(target)), format_func=lambda p: f"p{p:g}",
            key=f"{kind}_percentile", bind="query-params", disabled=not on,
        )  # fmt: skip
    kept = further(read.targets)
    if kept:
        st.caption(f"Also in force, set over the API and kept: {plain(in_words(kept))}.")
    st.button("Apply", type="primary", icon=":material/bolt:", key="apply_targets", on_click=save, args=(read.version,))
    if st.session_state.get(_FAULT):
        show_fault(st.session_state[_FAULT])


heading("Targets", "Decode steps are planned so that the tightest target holds; the rest is finetuning's.")
if _READ not in st.session_state:
    with reading("the targets"):
        st.session_state[_READ] = client().targets()
if _STORED in st.session_state:
    load(st.session_state.pop(_STORED))
show_present()
with st.container(border=True):
    show_form()
with st.expander("From a shell or over HTTP", icon=":material/terminal:"):
    elsewhere(
        "harli targets show\nharli targets set itl=80 ttft=2000@0.95",
        "curl {api}/api/targets\ncurl -X PUT {api}/api/targets -H 'content-type: application/json' \\\n"
        '  -d \'{"version": 1, "targets": [{"kind": "itl", "ms": 80}]}\'',
    )
