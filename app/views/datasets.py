"""Data sets: upload with its report, rows and the packed first batch (``?dataset=``), download, delete."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import streamlit as st

from app.ui.bars import show_bars
from app.ui.data import client, settings
from app.ui.page import attempt, confirm, elsewhere, heading, reading, show_faults, teach
from app.ui.paging import ROWS, leaf_through
from app.ui.press import pressed
from app.ui.report import show_findings, verdict
from app.ui.rows import show_packed, show_rendered, show_rows
from app.ui.sending import send, watch
from app.ui.table import Column, Row, cell, table
from app.ui.text import counted, number, plain, size, span, when
from app.ui.tiles import Tile, tiles
from app.ui.uploads import limit_mib, name_field, name_from, open_what_was_sent, upload_form
from core.api.schemas import Dataset, DatasetPreview, DatasetReport
from core.client import Client
from core.errors import HarliError

_ROWS_SHOWN = 10
_TYPES = ["jsonl", "json", "csv", "tsv", "txt", "parquet", "arrow", "gz", "zst"]
_FORMATS = (
    "OpenAI chat (`messages`), ShareGPT (`conversations`), Alpaca (`instruction`, `input`, `output`), prompt and "
    "completion, or plain text; as JSON Lines, JSON, CSV, TSV, Parquet or Arrow, gzip or zstd too."
)
# What a column can be told to be; the roles of intake that a chat is made of.
_COLUMN_ROLES = ("prompt", "completion", "system", "messages", "tools", "text")
_PREVIEWED = 3
_CLI = "harli datasets upload my-rows.jsonl --name my-rows"
_HTTP = "curl -F file=@my-rows.jsonl '{api}/api/datasets?name=my-rows'"


def row(dataset: Dataset) -> Row:
    report = dataset.report
    return Row(
        dataset.id,
        (
            cell(dataset.name),
            cell(f"v{dataset.version}"),
            verdict(report),
            cell(number(report.rows)),
            cell(number(report.tokens)),
            cell(report.format),
            cell(size(dataset.bytes)),
            cell(dataset.created_at),
        ),
    )


def mapping() -> dict[str, str]:
    """The columns that the viewer has chosen, by role."""
    chosen = {role: st.session_state.get(f"column_{role}") for role in _COLUMN_ROLES}
    return {role: column for role, column in chosen.items() if column}


def upload(form: dict[str, Any], file: Any, name: str) -> None:
    """Begin to send the chosen file."""
    new_version = st.session_state.get("dataset_new_version", False)
    columns, api = mapping() or None, client()

    def store(operation: str) -> str:
        file.seek(0)
        return api.upload_dataset(
            file, name, filename=file.name, columns=columns, new_version=new_version, operation=operation
        ).id

    send(form, f"Uploading {file.name}", f"{file.name} stored", store)


def look(file: Any, columns: dict[str, str]) -> DatasetPreview | None:
    """How the file would be read; None, with a word why, when it cannot be."""
    seen: dict[str, Any] = st.session_state.setdefault("_dataset_preview", {"of": None, "found": None})
    if seen["of"] != (file.file_id, columns):
        try:
            file.seek(0)
            seen["found"] = client().preview_dataset(file, filename=file.name, columns=columns or None)
        except HarliError as error:
            seen["found"] = error
        seen["of"] = (file.file_id, columns)
    if isinstance(seen["found"], HarliError):
        st.markdown(f":material/error: {plain(seen['found'].message)}")
        return None
    found: DatasetPreview = seen["found"]
    return found


def show_preview(found: DatasetPreview) -> None:
    """What the file is, its first rows, and what is wrong with them."""
    if found.format is not None:
        read = " · ".join(f"{plain(role)} ← `{column}`" for role, column in found.mapping.items())
        st.markdown(f"{plain(found.container)}, read as **{plain(found.format)}**{f': {read}' if read else ''}")
    else:
        st.markdown(f"{plain(found.container)}, and none of its columns has a usual name: say below which is what.")
    for fault in found.faults[:_PREVIEWED]:
        st.markdown(f":material/error: {plain(fault)}")
    show_remarks(found)
    if found.rows:
        show_rows(found.rows[:_PREVIEWED])


def show_remarks(found: DatasetPreview) -> None:
    """What the report will remark, as far as the rows that were looked at tell; said as such."""
    usual = settings().finetune.micro_batch_tokens
    longest = found.longest_row_tokens if (found.longest_row_tokens or 0) > usual else None
    if not found.languages and not found.findings and longest is None:
        return
    spoken = ", ".join(f"{language} {number(rows)}" for language, rows in found.languages.items())
    of = f"{'Of its' if found.whole else 'Of the first'} {counted(found.looked_at, 'row')}"
    st.caption(f"{of}, by language: {plain(spoken)}" if spoken else f"{of}:")
    if longest is not None:
        st.markdown(
            f":material/warning: The longest has {number(longest)} tokens, and a job's usual micro-batch "
            f"{number(usual)}: a job on it needs a larger one; rows are never cut."
        )
    for finding in found.findings:
        where = f" ({'; '.join(plain(example) for example in finding.examples)})" if finding.examples else ""
        st.markdown(f":material/warning: {number(finding.count)} × {plain(finding.message)}{where}")


def show_mapping(found: DatasetPreview | None) -> None:
    """Which column is what; open while that is not known."""
    unknown = found is not None and found.format is None
    names = [column.name for column in found.columns] if found is not None else []
    shown = {one.name: f"{one.name} ({one.kind}: {one.example[:40]})" for one in found.columns} if found else {}
    with st.expander("Columns with other names", expanded=unknown, icon=":material/view_column:", key="columns"):
        st.caption("Usual names are found by themselves. Where the file has others, say which column is what.")
        for role in _COLUMN_ROLES:
            st.selectbox(
                f"Column of the {role}", names, None, key=f"column_{role}", format_func=lambda one: shown.get(one, one),
                placeholder=found.mapping.get(role, "none") if found is not None else "none",
            )  # fmt: skip


def show_upload() -> None:
    """File, name and the press; the name is checked before anything is sent to the API."""
    form = upload_form("dataset")
    file = st.file_uploader(
        f"Drop a file here or choose one: up to {limit_mib()} MiB from the browser", _TYPES,
        key=f"dataset_file_{form['round']}", max_upload_size=limit_mib(),
    )  # fmt: skip
    st.caption(
        f"{_FORMATS} Larger files, up to {number(settings().max_upload_mib)} MiB, go by the command line or HTTP."
    )
    if file is not None:
        name, usable = name_field("dataset", name_from(file.name), client().check_dataset_name)
        found = look(file, mapping())
        if found is not None:
            show_preview(found)
        show_mapping(found)
        if pressed(
            "Upload and check", form, icon=":material/upload:", key="dataset_upload",
            disabled=not usable or form["sending"] is not None,
        ):  # fmt: skip
            upload(form, file, name)
            st.rerun()
    if form["sending"] is not None:
        watch(form)
    show_faults("upload")
    elsewhere(_CLI, _HTTP)


def show_report(report: DatasetReport) -> None:
    """What the validator saw: per reason the count, the first places and examples."""
    if report.columns:
        mapping = " · ".join(f"{plain(role)} ← `{column}`" for role, column in report.columns.items())
        st.markdown(f"Read as **{plain(report.format)}**: {mapping}")
    if not report.findings:
        st.success("Every row is usable, and nothing stands out.", icon=":material/check_circle:")
    show_findings(report)
    left, right = st.columns(2, gap="large")
    with left:
        if report.lengths:
            buckets = [(f"{number(b.up_to // 2 + 1)} to {number(b.up_to)}", b.rows) for b in report.lengths]
            show_bars(f"Rows by length, {report.length_unit}", buckets)
    with right:
        if report.languages:
            sampled = sum(report.languages.values())
            show_bars(f"Languages, of {number(sampled)} rows looked at", list(report.languages.items()))


def show_estimate(dataset: Dataset) -> None:
    """What a job with the usual settings would take; time only where a speed was measured."""
    try:
        found = client().estimate_job(dataset=dataset.id, adapter_name=dataset.name)
    except HarliError as error:
        st.caption(f"A job with the usual settings cannot be run on it: {plain(error.message)}")
        return
    if found.steps is None:
        st.caption("Steps and time of a job are not known yet: they need the served model's tokenizer.")
        return
    time = f"about {span(found.seconds)}" if found.seconds is not None else "a time that is not known yet"
    speed = f" at {number(found.speed.tokens_s)} tokens/s, as measured" if found.speed is not None else ""
    st.caption(
        f"A job with the usual settings takes {number(found.steps)} steps over {number(found.tokens)} tokens, and "
        f"{time}{speed}."
    )


def show_packing(dataset: Dataset) -> None:
    """The first micro-batch for a size of the viewer's choice."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        tokens = st.number_input(
            "Tokens per micro-batch", 32, 65536, settings().finetune.micro_batch_tokens, 32, key="packed_tokens",
            persist_state="session", width=190,
        )  # fmt: skip
        longest = st.number_input(
            "Longest row, tokens", 16, 65536, None, key="packed_longest", persist_state="session", width=190,
            placeholder="micro-batch",
        )  # fmt: skip
    with reading("the packed batch"), st.spinner("Tokenising …"):
        preview = client().dataset_packed(dataset.id, int(tokens), sequence_length=longest)
    show_packed(preview)


def parquet(api: Client, dataset_id: str) -> bytes:
    """The normalised file, read when the download is pressed: in a thread that does not know the viewer."""
    with tempfile.TemporaryDirectory() as folder:
        return api.download_dataset(dataset_id, Path(folder) / "rows.parquet").read_bytes()


def close() -> None:
    st.query_params.pop("dataset", None)


def delete(dataset: Dataset) -> None:
    if attempt("Deleting the data set", lambda: client().delete_dataset(dataset.id), f"{dataset.name} deleted"):
        close()


def detail(dataset: Dataset) -> None:
    """One version of a data set."""
    report = dataset.report
    with st.container(horizontal=True, vertical_alignment="center"):
        st.button("All data sets", icon=":material/arrow_back:", type="tertiary", on_click=close, key="all_datasets")
        st.markdown(f"`{dataset.id}`")
    digest = (report.content_sha256 or dataset.sha256)[:12]
    heading(dataset.name, f"Version {dataset.version} · uploaded {when(dataset.created_at)} · content {digest}")
    with st.container(horizontal=True, vertical_alignment="center"):
        st.page_link(
            "views/jobs.py", label="Train on it", icon=":material/model_training:",
            query_params={"view": "New job", "new_dataset": dataset.name},
        )  # fmt: skip
        st.download_button(
            "Download Parquet", partial(parquet, client(), dataset.id), f"{dataset.name}-v{dataset.version}.parquet",
            icon=":material/download:", on_click="ignore", key="dataset_download",
        )  # fmt: skip
        confirm(
            "Delete",
            f"Delete version {dataset.version} of **{plain(dataset.name)}**? Its rows cannot be brought back; adapters "
            "trained on it stay.",
            "Delete it",
            lambda: delete(dataset),
            key="dataset_delete",
        )
    tiles(
        [
            Tile("Rows", number(report.rows), "", f"{number(report.rows_read)} read"),
            Tile("Tokens", number(report.tokens), "", f"{number(report.answer_tokens)} in answers"),
            Tile("Mean row", number(report.mean_row_tokens), "tokens", f"longest {number(report.longest_row_tokens)}"),
            Tile("Size", size(dataset.bytes), "", report.format),
        ],
        key="dataset_figures",
        columns=4,
    )
    checked, shown, packed = st.tabs(["Report", "Rows", "Packed batch"], key="dataset_tabs", on_change="rerun")
    with checked:
        show_estimate(dataset)
        show_report(report)
    if shown.open:
        with shown:
            pages = max(1, -(-report.rows // _ROWS_SHOWN))
            at = st.pagination(pages, key="rows_page") if pages > 1 else 1
            seen = st.toggle("As the model sees them", key="rows_rendered")
            with reading("the rows"):
                if seen:
                    show_rendered(client().dataset_rendered(dataset.id, (at - 1) * _ROWS_SHOWN, _ROWS_SHOWN))
                else:
                    show_rows(client().dataset_rows(dataset.id, (at - 1) * _ROWS_SHOWN, _ROWS_SHOWN))
    if packed.open:
        with packed:
            show_packing(dataset)


def listing() -> None:
    """All data sets beside the upload form."""
    left, right = st.columns([2, 1], gap="large")
    with right:
        st.markdown("**Upload**")
        show_upload()
    with left:
        with reading("the data sets"):
            datasets = leaf_through("datasets", lambda cursor: client().datasets(ROWS, cursor))
        if not datasets:
            teach(
                "No data set yet",
                f"A data set is what a job learns from: questions and the answers you want. Upload a file: {_FORMATS} "
                "It is checked row by row, and nothing is stored when it cannot be used.",
            )
            return
        columns = [
            Column("Name"), Column("Version"), Column("Check", "badge"), Column("Rows", end=True),
            Column("Tokens", end=True, wide=True), Column("Format", wide=True), Column("Size", end=True, wide=True),
            Column("Uploaded", "time", wide=True),
        ]  # fmt: skip
        pressed = table(columns, [row(dataset) for dataset in datasets], key="datasets")
        if pressed:
            st.query_params["dataset"] = pressed
            st.rerun()


open_what_was_sent("dataset")
if "dataset" in st.query_params:
    with reading("the data set"):
        found = client().dataset(st.query_params["dataset"])
    detail(found)
else:
    heading("Data sets", "What jobs learn from: questions and answers, checked row by row when they come in.")
    listing()
