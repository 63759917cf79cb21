"""Engine: what serves here, with which settings and versions, the parts of Harli with their memory, and what the
machine has and lacks."""

from __future__ import annotations

from datetime import UTC, datetime

import streamlit as st

from app.ui.data import REFRESH_S, client, doctor, live, parts
from app.ui.identity import of_platform
from app.ui.page import Fault, elsewhere, heading, reading, show_fault
from app.ui.states import PART_TONES, badge
from app.ui.table import Cell, Column, Row, Tone, cell, table
from app.ui.text import number, percent, plain, size, span
from app.ui.tiles import BarPart, Tile, tiles
from core.api.schemas import Doctor, Engine, Live, Part, TelemetryPoint

_ENGINE_TONES: dict[str, Tone] = {"ready": "good", "lost": "bad", "absent": "warn"}
_EXAMINE = "_examine"
# As `harli.toml` has it, and not Python.
_WRITTEN = {"None": "not set", "True": "true", "False": "false", "[]": "none", "{}": "none"}
_LEVELS: dict[str, Tone] = {"ok": "good", "note": "warn", "missing": "bad"}


def figures(now: Live) -> list[Tile]:
    """Memory, power and cache of this second, and how long the engine has been there."""
    second = now.now
    kv_share = second.kv_used / second.kv_total if second is not None and second.kv_total else 0.0
    since = (datetime.now(UTC) - now.engine.since).total_seconds() if now.engine.since else None
    return [
        Tile("Memory in use", size(second.memory_bytes) if second else "–", "", "device, or the process on a CPU"),
        Tile(
            "KV cache", percent(kv_share), "%",
            f"{number(second.kv_used)} / {number(second.kv_total)} tokens" if second else "", bar=(BarPart(kv_share),),
        ),
        Tile("Power", *_power(second), help="What the whole GPU draws, as its driver tells it"),
        Tile("Decode step alone", number(now.engine.solo_itl_ms, 1), "ms", "median, measured at the start"),
        Tile("Parameters", number((now.engine.parameters or 0) / 1e6), "M", now.engine.dtype or ""),
        Tile("Running for", span(since) if since is not None else "–", "", now.engine.id or ""),
    ]  # fmt: skip


def _power(second: TelemetryPoint | None) -> tuple[str, str, str]:
    """Value, unit and note: what nobody measures is no zero."""
    if second is None or second.power_w is None:
        return "–", "", "told on a GPU only" if second is not None else ""
    return number(second.power_w), "W", "of the whole GPU"


def part_row(part: Part) -> Row:
    return Row(
        part.name,
        (
            Cell(part.name, part.url or ""),
            Cell(part.state.replace("_", " "), part.message, PART_TONES[part.state]),
            cell(part.restarts),
            cell(size(part.memory_bytes) if part.memory_bytes is not None else "–"),
            cell(part.pid if part.pid is not None else "–"),
            cell(part.since),
        ),
    )


def show_parts() -> None:
    st.markdown("**Parts**")
    with reading("the parts"):
        found = parts()
    if not found:
        st.caption("Harli was not started by `harli up`, so that nothing supervises its processes.")
        return
    columns = [
        Column("Part"), Column("State", "badge"), Column("Restarts", end=True), Column("Memory", end=True),
        Column("Process", end=True, wide=True), Column("Since", "time", wide=True),
    ]  # fmt: skip
    table(columns, [part_row(part) for part in found], key="engine_parts", openable=False)


@st.fragment(run_every=REFRESH_S)
def show_live() -> None:
    """What moves: state, memory, parts."""
    with reading("the engine"):
        now = live()
    engine = now.engine
    served = " · ".join(part for part in (engine.model, engine.device_name or engine.device) if part)
    st.markdown(f"{badge(f'engine {engine.state}', _ENGINE_TONES[engine.state])} {plain(served)}")
    if engine.state == "absent":
        st.caption("No engine has reported yet. Loading a model takes seconds to minutes; the parts say how far it is.")
    tiles(figures(now), key="engine", columns=6)
    show_parts()


def pairs(values: dict[str, str]) -> list[Row]:
    return [Row(name, (cell(name), cell(_WRITTEN.get(value, value)))) for name, value in values.items()]


def base_models(engine: Engine) -> dict[str, str]:
    """What other models jobs may finetune, and why one cannot be had."""
    return {
        f"base {base.name}": base.refused
        or f"{base.window_layers} of {base.layers} layers at a time, {size(base.window_bytes)} on the device and "
        f"{size(base.host_bytes)} of host memory while a job runs"
        for base in engine.base_models
    }


def show_settings(engine: Engine) -> None:
    """What the engine runs with, as it reported it, and what the API was started with."""
    own, *api = st.tabs(["In the engine", "Of the API"] if of_platform() else ["In the engine"])
    with own:
        given = {
            "policy": engine.policy, "margin": f"{engine.margin:g}", "KV cache, tokens": number(engine.kv_tokens),
            "partitions": ", ".join(engine.partitions), "LoRA modules": ", ".join(engine.lora_modules),
            "model folder": engine.model_path or "", **base_models(engine), **engine.settings,
        }  # fmt: skip
        if engine.state == "absent":
            st.caption("No engine has reported its settings yet.")
        else:
            table([Column("Setting", "mono"), Column("Value")], pairs(given), key="engine_settings", openable=False)
    for tab in api:
        with tab, reading("the settings"):
            settings = client().settings()
            table([Column("Setting", "mono"), Column("Value")], pairs(settings), key="api_settings", openable=False)
            st.caption("From the environment (HARLI_…) or harli.toml; a change counts from the next start.")


def show_versions(engine: Engine) -> None:
    with reading("the API"):
        health = client().health()
    versions = {"harli (API)": health.version, "database": health.database, **engine.versions}
    table([Column("Package", "mono"), Column("Version")], pairs(versions), key="versions", openable=False)


@st.fragment(run_every="2s")
def show_doctor() -> None:
    """What the machine has and lacks; examined when it is asked for, since that takes some seconds of a processor."""
    if not st.session_state.get(_EXAMINE):
        if st.button("Examine this machine", icon=":material/stethoscope:", key="examine"):
            st.session_state[_EXAMINE] = True
            st.rerun(scope="fragment")
        st.caption("The report of `harli doctor` on the machine of the API, in some seconds.")
        return
    answer = doctor()
    if answer.error is not None:
        show_fault(Fault("Examining the machine", answer.error))
    if answer.value is None:
        if answer.error is None:
            st.caption("Examining …")
        return
    show_findings(answer.value)


def show_findings(report: Doctor) -> None:
    tone: Tone = "good" if report.ok else "bad"
    st.markdown(badge("Harli can run here" if report.ok else "Harli cannot run here yet", tone))
    rows = [
        Row(str(number_), (Cell(finding.topic, tone=_LEVELS[finding.level]), cell(finding.value, finding.remedy)))
        for number_, finding in enumerate(report.findings)
    ]
    table([Column("What", "badge"), Column("Found")], rows, key="doctor", openable=False)


heading("Engine", "What serves and trains here: its settings, versions, memory, and the machine under it.")
show_live()
with reading("the engine"):
    present = live().engine
left, right = st.columns([1.4, 1], gap="medium")
with left:
    st.markdown("**Settings in force**")
    show_settings(present)
with right:
    st.markdown("**Versions**")
    show_versions(present)
    if of_platform():
        st.markdown("**Machine**")
        show_doctor()
elsewhere(
    "harli doctor\nharli notices\nharli logs engine --follow",
    "curl {api}/api/engine\ncurl {api}/api/parts\ncurl {api}/api/settings\ncurl {api}/metrics    # for Prometheus",
)
