"""Adapters: upload, versions with their lineage, deployment into the engine (``?adapter=``)."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import streamlit as st

from app.ui.data import client, settings
from app.ui.page import attempt, confirm, elsewhere, heading, reading, show_faults, teach
from app.ui.paging import ROWS, leaf_through
from app.ui.press import pressed
from app.ui.sending import send, wait
from app.ui.states import badge
from app.ui.table import Cell, Column, Row, Tone, cell, table
from app.ui.text import number, plain, size, when
from app.ui.uploads import limit_mib, name_field, name_from, open_what_was_sent, upload_form
from core.api.schemas import Adapter, AdapterVersion
from core.client import Client

_DEPLOYMENT_TONES: dict[str, Tone] = {
    "none": "idle", "loading": "busy", "deployed": "good", "unloading": "busy", "failed": "bad",
}  # fmt: skip
_ALIAS = re.compile(r"[a-z][a-z0-9-]{0,30}")
_SETTLED = ("none", "deployed", "failed")
_CLI = (
    "harli adapters upload my-adapter/ --name support-bot\nharli adapters deploy support-bot\n"
    "harli adapters promote support-bot prod"
)
_HTTP = (
    "curl -F file=@my-adapter.zip '{api}/api/adapters?name=support-bot'\n"
    "curl -X POST {api}/api/adapters/support-bot/deploy -H 'content-type: application/json' -d '{}'"
)


def deployment_cell(adapter: Adapter) -> Cell:
    """What the engine serves under the name, and what it is asked to."""
    text = adapter.deployment
    if adapter.deployment == "none":
        return Cell("not deployed", tone="idle")
    shown = adapter.wanted_version if adapter.deployment == "loading" else adapter.deployed_version
    note = adapter.error.message if adapter.error else ""
    return Cell(f"{text} v{shown}" if shown else text, note, _DEPLOYMENT_TONES[adapter.deployment])


def row(adapter: Adapter) -> Row:
    newest = newest_of(adapter)
    return Row(
        adapter.name,
        (
            cell(adapter.name),
            deployment_cell(adapter),
            cell(f"v{newest.version}" if newest else "–"),
            cell(newest.origin if newest else "–"),
            cell(newest.rank if newest else "–"),
            cell(size(newest.bytes) if newest else "–"),
            cell(newest.created_at if newest else adapter.created_at),
        ),
    )


def newest_of(adapter: Adapter) -> AdapterVersion | None:
    return max(adapter.versions, key=lambda version: version.version, default=None)


def upload(form: dict[str, Any], files: list[Any], name: str) -> None:
    """Begin to send the chosen files as one adapter."""
    new_version = st.session_state.get("adapter_new_version", False)
    api = client()

    def store(_: str) -> str:
        if len(files) == 1 and not files[0].name.endswith((".json", ".safetensors")):
            files[0].seek(0)
            api.upload_adapter(files[0], name, filename=files[0].name, new_version=new_version)
        else:
            with tempfile.TemporaryDirectory() as folder:
                for file in files:
                    (Path(folder) / Path(file.name).name).write_bytes(file.getbuffer())
                api.upload_adapter(Path(folder), name, new_version=new_version)
        return name

    sent = ", ".join(file.name for file in files)
    send(form, f"Uploading {sent}", f"{sent} stored", store)


def show_upload() -> None:
    """Files, name and the press; the name is checked before anything is sent to the API."""
    form = upload_form("adapter")
    files = st.file_uploader(
        f"Drop a zip of a peft folder here, or its files: up to {limit_mib()} MiB from the browser",
        ["zip", "tar", "tgz", "gz", "json", "safetensors"], accept_multiple_files=True,
        key=f"adapter_files_{form['round']}", max_upload_size=limit_mib(),
    )  # fmt: skip
    st.caption(
        "Wanted: `adapter_config.json` and `adapter_model.safetensors`, as `save_pretrained` of peft writes them, for "
        f"the served base model. Up to {number(settings().max_upload_mib)} MiB go by the command line or HTTP."
    )
    if files:
        archive = next((file.name for file in files if not file.name.endswith((".json", ".safetensors"))), "")
        name, usable = name_field("adapter", name_from(archive), client().check_adapter_name)
        if pressed(
            "Upload and check", form, icon=":material/upload:", key="adapter_upload",
            disabled=not usable or form["sending"] is not None,
        ):  # fmt: skip
            upload(form, files, name)
            st.rerun()
    if form["sending"] is not None:
        wait(form, "Sending the adapter; it is checked against the served model …")
    show_faults("upload")
    elsewhere(_CLI, _HTTP)


def archive(api: Client, name: str, version: int) -> bytes:
    """A zip of the peft folder, read when the download is pressed: in a thread that does not know the viewer."""
    with tempfile.TemporaryDirectory() as folder:
        return api.download_adapter(name, Path(folder) / "adapter.zip", version).read_bytes()


def close() -> None:
    st.query_params.pop("adapter", None)


def delete(name: str, version: int | None) -> None:
    what = f"{name}@{version}" if version else name
    gone = attempt(f"Deleting {what}", lambda: client().delete_adapter(name, version), f"{what} deleted")
    if gone and version is None:
        close()


def deploy(name: str, version: int) -> None:
    what = f"{name}@{version}"
    attempt(f"Deploying {what}", lambda: client().deploy_adapter(name, version), f"{what} is being loaded")


def undeploy(name: str) -> None:
    attempt(f"Undeploying {name}", lambda: client().undeploy_adapter(name), f"{name} is being unloaded")


@st.fragment(run_every="1s")
def watch(name: str, drawn: Sequence[str]) -> None:
    """While the engine loads or unloads: draw the page anew when that has ended."""
    with reading("the adapter"):
        found = client().adapter(name)
    if [found.deployment, *(alias.deployment for alias in found.aliases)] != list(drawn):
        st.rerun()
    st.caption("The engine loads or unloads it …")


def promote(name: str, alias: str, version: int) -> None:
    what = f"{name}@{alias}"
    attempt(f"Promoting {what}", lambda: client().promote_adapter(name, alias, version), f"{what} is version {version}")


def roll_back(name: str, alias: str) -> None:
    what = f"{name}@{alias}"
    attempt(f"Rolling {what} back", lambda: client().roll_back_adapter(name, alias), f"{what} is what it was before")


def delete_alias(name: str, alias: str) -> None:
    what = f"{name}@{alias}"
    attempt(f"Deleting {what}", lambda: client().delete_alias(name, alias), f"{what} deleted")


def promote_typed(name: str) -> None:
    """Promote what the form below names."""
    alias = st.session_state["alias_name"].strip()
    if not _ALIAS.fullmatch(alias):
        st.toast("An alias is a letter, then letters, digits and dashes, such as prod.", icon=":material/edit:")
        return
    promote(name, alias, st.session_state["alias_version"])


def show_aliases(adapter: Adapter) -> None:
    """The names that applications call, what they stand for, and the way to change it."""
    numbers = [version.version for version in sorted(adapter.versions, key=lambda version: -version.version)]
    with st.expander(
        f"Aliases ({len(adapter.aliases)})", icon=":material/label:", key="aliases", expanded=bool(adapter.aliases)
    ):
        st.caption(
            "Applications call an alias, and the version behind it can change. The engine serves it under its own "
            "name; when it changes, the requests that use it end first."
        )
        for alias in adapter.aliases:
            with st.container(horizontal=True, vertical_alignment="center", key=f"alias_{alias.alias}"):
                tone = _DEPLOYMENT_TONES[alias.deployment]
                st.markdown(f"`{alias.address}` → version {alias.wanted_version}", width="content")
                st.markdown(badge(alias.deployment, tone), width="content")
                if alias.history:
                    st.button(
                        f"Back to version {alias.history[-1]}", icon=":material/undo:", key=f"back_{alias.alias}",
                        on_click=roll_back, args=(adapter.name, alias.alias),
                    )  # fmt: skip
                confirm(
                    "Delete",
                    f"Delete **{plain(alias.address)}**? Who calls it gets an error from then on; the version stays.",
                    "Delete it",
                    lambda alias=alias: delete_alias(adapter.name, alias.alias),  # type: ignore[misc]
                    key=f"unalias_{alias.alias}",
                )
            if alias.error:
                st.error(f"{plain(alias.error.message)}  \n`{alias.error.code}`", icon=":material/error:")
        with st.container(horizontal=True, vertical_alignment="bottom"):
            st.text_input("Alias", key="alias_name", placeholder="prod", max_chars=31, width=180)
            st.selectbox("Version", numbers, key="alias_version", width=140)
            st.button("Promote", icon=":material/publish:", key="promote", on_click=promote_typed, args=(adapter.name,))


def lineage(version: AdapterVersion) -> str:
    """Where a version comes from, in words."""
    parts = [f"base `{version.base}`" if version.base else "base not known"]
    if version.dataset:
        parts.append(f"data set `{version.dataset}`")
    if version.job_id:
        parts.append(f"job `{version.job_id}`")
    if version.parents:
        parts.append("the sum of " + ", ".join(f"`{parent}`" for parent in version.parents))
    return " · ".join(parts)


def export(name: str, version: int) -> None:
    def begin() -> None:
        st.session_state["_merge"] = client().export_merged(name, version).id

    attempt(f"Merging {name}@{version} into its base", begin, place="merge")


def cancel_merge(operation_id: str) -> None:
    attempt("Cancelling the merge", lambda: client().cancel_operation(operation_id), place="merge")


@st.fragment(run_every="0.7s")
def watch_merge(operation_id: str) -> None:
    """How far a merged model is; then where to get it."""
    with reading("the merge"):
        found = client().operation(operation_id)
    if found.state == "running":
        share = min(found.done / found.total, 1.0) if found.total else 0.0
        st.progress(share, f"Merging {found.subject} into its base: {size(found.done)} of {size(found.total)}")
        st.button("Cancel", key="cancel_merge", on_click=cancel_merge, args=(operation_id,))
    elif found.state == "succeeded":
        url = f"{settings().api_url}/api/operations/{operation_id}/download"
        st.success(f"{found.subject} is merged. It is kept for a day.", icon=":material/check_circle:")
        st.code(f'curl -H "Authorization: Bearer $HARLI_TOKEN" -o {found.result} {url}', language="bash")
    else:
        why = found.error.message if found.error else "it was cancelled"
        st.warning(f"{found.subject} was not merged: {plain(why)}", icon=":material/error:")


def show_version(adapter: Adapter, version: AdapterVersion) -> None:
    """One version: shape, lineage and what can be done with it."""
    served = adapter.deployed_version == version.version
    with st.container(border=True, key=f"version_{version.version}"):
        with st.container(horizontal=True, vertical_alignment="center"):
            st.markdown(f"**Version {version.version}**", width="content")
            if served:
                st.markdown(badge("deployed", "good"), width="content")
            st.caption(
                f"{version.origin} {when(version.created_at)} · rank {version.rank} · alpha {number(version.alpha, 1)}"
                f" · {size(version.bytes)} · sha256 {version.sha256[:12]}",
                width="content",
            )
        st.caption(f"{lineage(version)} · modules {', '.join(f'`{module}`' for module in version.target_modules)}")
        with st.container(horizontal=True, vertical_alignment="center"):
            if not served:
                st.button(
                    "Deploy", icon=":material/rocket_launch:", key=f"deploy_{version.version}", on_click=deploy,
                    args=(adapter.name, version.version), disabled=adapter.deployment in ("loading", "unloading"),
                )  # fmt: skip
            st.download_button(
                "Download", partial(archive, client(), adapter.name, version.version),
                f"{adapter.name}-v{version.version}.zip", icon=":material/download:", on_click="ignore",
                key=f"download_{version.version}",
            )  # fmt: skip
            st.button(
                "Merge into base", icon=":material/merge:", key=f"merge_{version.version}", on_click=export,
                args=(adapter.name, version.version), help="The whole model with this version added, for other servers",
            )  # fmt: skip
            confirm(
                "Delete",
                f"Delete version {version.version} of **{plain(adapter.name)}**? It cannot be brought back.",
                "Delete it",
                lambda: delete(adapter.name, version.version),
                key=f"delete_{version.version}",
            )
            if version.job_id:
                st.page_link(
                    "views/jobs.py", label="its job", icon=":material/model_training:",
                    query_params={"job": version.job_id},
                )  # fmt: skip
            if version.dataset_id:
                st.page_link(
                    "views/datasets.py", label="its data set", icon=":material/database:",
                    query_params={"dataset": version.dataset_id},
                )  # fmt: skip


def detail(adapter: Adapter) -> None:
    """One adapter with all its versions."""
    st.button("All adapters", icon=":material/arrow_back:", type="tertiary", on_click=close, key="all_adapters")
    versions = len(adapter.versions)
    heading(adapter.name, f"{versions} version{'' if versions == 1 else 's'} · since {when(adapter.created_at)}")
    state = deployment_cell(adapter)
    with st.container(horizontal=True, vertical_alignment="center"):
        st.markdown(badge(state.text, state.tone), width="content")
        if adapter.deployed_version is not None:
            st.page_link(
                "views/playground.py", label="Chat with it", icon=":material/forum:",
                query_params={"right": adapter.name},
            )  # fmt: skip
            confirm(
                "Undeploy",
                f"Undeploy **{plain(adapter.name)}**? Who calls it gets an error until it is deployed again; its "
                "versions stay.",
                "Undeploy it",
                lambda: undeploy(adapter.name),
                key="undeploy",
                icon=":material/eject:",
            )
        confirm(
            "Delete all",
            f"Delete **{plain(adapter.name)}** with all its versions? They cannot be brought back.",
            "Delete them all",
            lambda: delete(adapter.name, None),
            key="delete_all",
        )
    if adapter.error:
        st.error(f"{plain(adapter.error.message)}  \n`{adapter.error.code}`", icon=":material/error:")
    states = [adapter.deployment, *(alias.deployment for alias in adapter.aliases)]
    if not all(state in _SETTLED for state in states):
        watch(adapter.name, states)
    show_faults("merge")
    if "_merge" in st.session_state:
        watch_merge(st.session_state["_merge"])
    show_aliases(adapter)
    for version in sorted(adapter.versions, key=lambda version: -version.version):
        show_version(adapter, version)
    if adapter.deployed_version is not None:
        st.markdown("**Use it**")
        body = {"model": adapter.name, "messages": [{"role": "user", "content": "Hello"}]}
        st.code(
            f'curl {client().base_url}/v1/chat/completions -H "authorization: Bearer $HARLI_TOKEN" \\\n'
            f"  -H 'content-type: application/json' -d '{json.dumps(body)}'",
            language="bash",
        )
        st.caption(
            "HARLI_TOKEN is a token of yours: the **Tenants** page makes one. On this machine the file `admin-token` "
            "in Harli's data directory has one."
        )


def listing() -> None:
    """All adapters beside the upload form."""
    left, right = st.columns([2, 1], gap="large")
    with right:
        st.markdown("**Upload**")
        show_upload()
    with left:
        with reading("the adapters"):
            adapters = leaf_through("adapters", lambda cursor: client().adapters(ROWS, cursor))
        if not adapters:
            teach(
                "No adapter yet",
                "An adapter is a small addition to the base model, trained by a job here or elsewhere by peft. It is "
                "served under its own name, next to the base. Submit a job on the **Jobs** page, or upload one.",
            )
            return
        columns = [
            Column("Name"), Column("Deployment", "badge"), Column("Newest"), Column("Origin", wide=True),
            Column("Rank", end=True, wide=True), Column("Size", end=True, wide=True),
            Column("Created", "time", wide=True),
        ]  # fmt: skip
        pressed = table(columns, [row(adapter) for adapter in adapters], key="adapters")
        if pressed:
            st.query_params["adapter"] = pressed
            st.rerun()


open_what_was_sent("adapter")
if "adapter" in st.query_params:
    with reading("the adapter"):
        found = client().adapter(st.query_params["adapter"])
    detail(found)
else:
    heading("Adapters", "Trained here or uploaded; each is served under its own name, next to the base model.")
    listing()
