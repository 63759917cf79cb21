"""Memory: the one arena that KV cache and finetuning share, who holds how much of it, and what changed hands."""

from __future__ import annotations

import streamlit as st

from app.ui import charts
from app.ui.data import REFRESH_S, job_name, live, notices, telemetry
from app.ui.first import content_is_there
from app.ui.page import elsewhere, heading, reading
from app.ui.states import MEMORY_CODES
from app.ui.table import Cell, Column, Row, cell, table
from app.ui.text import counted, ms, number, percent, plain, size
from app.ui.theme import colours
from app.ui.tiles import BarPart, Tile, tiles
from core.api.schemas import Memory, MemoryOwner, Notice

_JOB = "job "
_WINDOWS = {"1 min": 60, "5 min": 300, "15 min": 900, "1 h": 3600}


def of_jobs(memory: Memory) -> int:
    """Bytes that finetune jobs hold."""
    return sum(owner.bytes for owner in memory.owners if owner.name.startswith(_JOB))


def figures(memory: Memory, kv_used: int) -> list[Tile]:
    """Of this second: the arena, and the two who share it."""
    jobs = of_jobs(memory)
    kv = sum(owner.bytes for owner in memory.owners) - jobs
    whole = memory.capacity_bytes or 1
    return [
        Tile(
            "Arena", size(memory.used_bytes), "", f"of {size(memory.capacity_bytes)} in use",
            help=f"In pages of {size(memory.page_bytes)}; at most {size(memory.high_water_bytes)} were ever in use",
            bar=(BarPart(kv / whole, "decode"), BarPart(jobs / whole, "finetune")),
        ),
        Tile(
            "KV cache", number(memory.kv_tokens), "tokens", f"{number(kv_used)} held · {size(kv)}",
            help="Slots that requests may hold now",
            bar=(BarPart(memory.kv_tokens / (memory.kv_most_tokens or 1), "decode"),),
        ),
        Tile(
            "Full KV cache", number(memory.kv_most_tokens), "tokens",
            f"{percent(memory.kv_tokens / (memory.kv_most_tokens or 1))} % of it now",
            help="What the KV cache grows to when requests need it, at finetuning's cost",
        ),
        Tile(
            "Finetuning", size(jobs), "",
            "state and activations" if memory.reclaim_ms is None
            else f"gave memory up {counted(memory.reclaims, 'time')}, last in {ms(memory.reclaim_ms)} ms",
            help="From when the first request was queued for the memory until it was free",
        ),
        Tile("Free", size(memory.capacity_bytes - memory.used_bytes), "", f"{size(memory.kept_bytes)} ready to map"),
    ]  # fmt: skip


def owner_cell(owner: MemoryOwner) -> Cell:
    """Who it is: the KV cache, or a job by its name, with its id beneath."""
    if not owner.name.startswith(_JOB):
        return Cell(owner.name.replace("kv cache", "KV cache"))
    job_id = owner.name.removeprefix(_JOB)
    name = job_name(job_id)
    return Cell(name, job_id) if name is not None else Cell(job_id)


def owner_row(owner: MemoryOwner, capacity: int) -> Row:
    share = owner.bytes / (capacity or 1)
    return Row(
        owner.name,
        (
            owner_cell(owner),
            Cell(size(owner.bytes), f"{percent(share)} %", share=share),
            cell(size(owner.high_water_bytes)),
        ),
    )


def notice_row(notice: Notice) -> Row:
    return Row(f"{notice.time.isoformat()} {notice.message}", (cell(notice.message), cell(notice.time)))


@st.fragment(run_every=REFRESH_S)
def show_now(seconds: int) -> None:
    """The figures, the map over the last `seconds`, the owners, what changed hands."""
    with reading("the engine's memory"):
        now = live().now
    if now is None or now.memory is None:
        st.info(
            "Nothing is shared now: either no engine runs (the **Engine** page says so), or its KV cache and "
            "finetuning have memory of their own, which the engine's setting `elastic_kv` decides.",
            icon=":material/grid_off:",
        )
        return
    tiles(figures(now.memory, now.kv_used), key="memory_now", columns=5)
    if not content_is_there("memory"):
        return
    with reading("the last minutes"):
        points = telemetry(seconds)
    unit, _ = charts.memory_unit(points)
    drawn = charts.memory(points, seconds, colours())
    charts.chart("Who holds the memory", drawn, key="memory_map", height=260, note=unit)
    owners = [owner_row(owner, now.memory.capacity_bytes) for owner in now.memory.owners if owner.high_water_bytes]
    columns = [Column("Owner"), Column("Holds", end=True), Column("Most ever", end=True)]
    st.markdown("**Owners**")
    table(columns, owners, key="memory_owners", openable=False)
    with reading("what changed hands"):
        changes = notices(*MEMORY_CODES)
    st.markdown("**What changed hands**")
    if changes:
        rows = [notice_row(notice) for notice in changes]
        table([Column("What"), Column("When", "time", wide=True)], rows, key="memory_changes", openable=False)
    else:
        st.caption(plain("Nothing yet: a job takes memory when it begins, and serving takes it back under load."))


heading("Memory", "KV cache and finetuning share one arena of pages, and the KV cache comes first.")
window = st.segmented_control(
    "Time shown", list(_WINDOWS), default="5 min", required=True, key="memory_window", bind="query-params",
    label_visibility="collapsed",
)  # fmt: skip
show_now(_WINDOWS[window])
elsewhere("harli notices", "curl {api}/api/live\ncurl '{api}/api/notices?code=memory_reclaimed&code=kv_grows'")
