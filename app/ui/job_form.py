"""The form of a new job. Its fields live in the page's address, so that a refresh, a page switch or a bookmark keeps
what was filled in; a press, however often repeated, submits one job."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from datetime import datetime
from typing import Any, get_args

import streamlit as st
from pydantic import ValidationError

from app.ui.data import all_adapters, all_datasets, client, engine, settings, signed_in_with
from app.ui.page import reading, show_faults, teach
from app.ui.press import pressed
from app.ui.sending import collect, new_form, send, wait
from app.ui.text import number, plain, span, viewer_zone, when
from core.api import presets
from core.api.job_schemas import JobEstimate
from core.api.schemas import Adapter, Dataset, Job, JobCreate, LoraBody, Preset
from core.errors import HarliError, Invalid

_PREFIX = "new_"
_FORM = "_job_form"
_ESTIMATE_S = 5.0
# What the preset says unless something is given.
_BY_PRESET = ("rank", "alpha", "learning_rate", "epochs", "evaluation_fraction", "evaluate_every", "patience")
_PRESET_HELP: dict[Preset, str] = {
    "quick": "One short pass at the default rank: does the data set do anything?",
    "balanced": "The default rank, and as many passes as a data set of this size needs: a sound first run.",
    "thorough": "Twice the rank, half the learning rate, more passes; evaluated on the way, stopped when that no "
    "longer improves, and the best adapter is kept.",
}
_KEEP_BEST = {"as the preset says": None, "the best evaluated": True, "the last one": False}


def defaults() -> dict[str, Any]:
    """Every field of the form with its first value, which is the API's own default where the API has one. None: what
    the preset, or the API, says."""
    job, lora = JobCreate(dataset="-", adapter_name="x"), LoraBody()
    return {
        "dataset": None, "adapter": "", "name": "", "preset": "balanced", "base": None, "start": None,
        "dropout": lora.dropout, "modules": list(lora.target_modules),
        "rslora": lora.use_rslora, "schedule": job.schedule,
        "warmup": job.warmup_ratio, "weight_decay": job.weight_decay, "clip": job.max_grad_norm,
        "length": "epochs", "steps": 100,
        "micro_batch_tokens": job.micro_batch_tokens, "accumulation": job.accumulation,
        "sequence_length": job.sequence_length, "seed": job.seed, "checkpoint_every": job.checkpoint_every,
        "keep_best": "as the preset says", "prompts": "", "priority": job.priority, "deadline": None,
        "deploy": job.deploy, **dict.fromkeys(_BY_PRESET),
    }  # fmt: skip


def request_of(fields: Mapping[str, Any]) -> JobCreate:
    """The API's request for the fields; raises Invalid for what is missing or out of range."""
    if not fields["dataset"]:
        raise Invalid(
            "dataset_missing", "no data set is chosen; choose one, or upload one on the Data sets page", "dataset"
        )
    if not fields["adapter"].strip():
        raise Invalid(
            "adapter_name_missing", "the adapter has no name; give the one it will be served under", "adapter_name"
        )
    by_steps = fields["length"] == "steps"
    lora: dict[str, Any] = {"dropout": fields["dropout"], "use_rslora": fields["rslora"]}
    if fields["start"] is None:
        # An adapter that is trained further keeps its shape; what is not given is taken from it.
        lora |= {"target_modules": fields["modules"], "rank": fields["rank"], "alpha": fields["alpha"]}
    chosen = {
        "dataset": fields["dataset"],
        "adapter_name": fields["adapter"].strip(),
        "preset": fields["preset"],
        "name": fields["name"].strip() or None,
        "base_model": fields["base"],
        "initial_adapter": fields["start"],
        "lora": LoraBody(**_given(lora)),
        "learning_rate": fields["learning_rate"],
        "schedule": fields["schedule"],
        "warmup_ratio": fields["warmup"],
        "weight_decay": fields["weight_decay"],
        "max_grad_norm": fields["clip"],
        "epochs": None if by_steps else fields["epochs"],
        "max_steps": fields["steps"] if by_steps else None,
        "micro_batch_tokens": fields["micro_batch_tokens"],
        "accumulation": fields["accumulation"],
        "sequence_length": fields["sequence_length"],
        "seed": fields["seed"],
        "evaluation_fraction": fields["evaluation_fraction"],
        "evaluate_every": fields["evaluate_every"],
        "checkpoint_every": fields["checkpoint_every"],
        "patience": fields["patience"],
        "keep_best": _KEEP_BEST[fields["keep_best"]],
        "sample_prompts": [line.strip() for line in fields["prompts"].splitlines() if line.strip()],
        "priority": fields["priority"],
        "deadline": _aware(fields["deadline"]),
        # The adapter of a base that is not served is never deployed, which is not for the form to say.
        "deploy": fields["deploy"] if fields["base"] is None else None,
    }
    try:
        return JobCreate(**_given(chosen))
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in fault["loc"])
        raise Invalid("invalid_request", f"{place}: {fault['msg']} (got {fault['input']!r})", place) from error


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _aware(time: datetime | None) -> datetime | None:
    """A time as it was typed, by the viewer's clocks."""
    return time.replace(tzinfo=viewer_zone()) if time is not None and time.tzinfo is None else time


def fields_of(job: Job) -> dict[str, Any]:
    """The form filled as it was for `job`."""
    spec = job.spec
    return {
        **defaults(),
        "dataset": job.dataset_name, "adapter": spec.adapter_name, "name": spec.name or "",
        "base": spec.base_model, "start": spec.initial_adapter,
        "rank": spec.lora.rank, "alpha": spec.lora.alpha, "dropout": spec.lora.dropout,
        "modules": list(spec.lora.target_modules), "rslora": spec.lora.use_rslora, "learning_rate": spec.learning_rate,
        "schedule": spec.schedule, "warmup": spec.warmup_ratio, "weight_decay": spec.weight_decay,
        "clip": spec.max_grad_norm, "length": "steps" if spec.max_steps else "epochs",
        "epochs": spec.epochs, "steps": spec.max_steps or defaults()["steps"],
        "micro_batch_tokens": spec.micro_batch_tokens, "accumulation": spec.accumulation,
        "sequence_length": spec.sequence_length, "seed": spec.seed, "evaluation_fraction": spec.evaluation_fraction,
        "evaluate_every": spec.evaluate_every, "checkpoint_every": spec.checkpoint_every, "patience": spec.patience,
        "keep_best": next(name for name, kept in _KEEP_BEST.items() if kept is spec.keep_best),
        "prompts": "\n".join(spec.sample_prompts), "priority": spec.priority, "deploy": spec.deploy,
    }  # fmt: skip


def fill(fields: Mapping[str, Any]) -> None:
    """Put values into the form; before it is drawn in this run."""
    for name, value in fields.items():
        st.session_state[_PREFIX + name] = value


def empty() -> None:
    """Put the first values into the form; before it is drawn in this run."""
    fill(defaults())


def typed() -> dict[str, Any]:
    """What the form holds now."""
    return {name: st.session_state.get(_PREFIX + name, value) for name, value in defaults().items()}


def rank_limit() -> int:
    """The largest rank that the engine can serve, as far as it is known."""
    return engine().max_lora_rank or 256


def submit() -> None:
    """Begin to submit what the form holds. A second press of the same form finds the first one's job."""
    form, fields, api = st.session_state[_FORM], typed(), client()
    fields["deadline"] = _aware(fields["deadline"])

    def store(_: str) -> str:
        request = request_of(fields)
        content = hashlib.sha256(request.model_dump_json().encode()).hexdigest()[:16]
        return api.submit_job(request, idempotency_key=f"{form['id']}-{content}").id

    send(form, "Submitting the job", "Job submitted", store)


def submitted() -> str | None:
    """The job that the form's press has made, until it is `opened`. The form is drawn empty before that, which takes
    its fields out of the address; until then a further press still finds the job."""
    form = st.session_state.get(_FORM)
    if form is None or form["opened"]:
        return None
    collect(form, "job_form")
    if form["made"] is not None:
        empty()
    made: str | None = form["made"]
    return made


def opened() -> None:
    """The job is on the screen, and the form is another one's."""
    st.session_state[_FORM]["opened"] = True


@st.cache_data(ttl=_ESTIMATE_S, show_spinner=False, max_entries=64)
def _asked(token: str | None, request: str) -> JobEstimate:
    """What the API makes of a request (its JSON); the same question of one viewer is asked once in some seconds."""
    return client().estimate_job(JobCreate.model_validate_json(request))


def estimated(fields: Mapping[str, Any]) -> JobEstimate | HarliError:
    """What the job would take, or why it would be refused; a name for the adapter may come later."""
    try:
        request = request_of({**fields, "adapter": fields["adapter"].strip() or "unnamed"})
        return _asked(signed_in_with(), request.model_dump_json(exclude_unset=True))
    except HarliError as error:
        return error


def estimate_text(found: JobEstimate) -> str:
    """Steps, tokens and, as far as it was measured, time."""
    if found.steps is None:
        return "The number of steps is known once the engine's tokenizer is."
    text = f"About {number(found.steps)} steps, {number(found.tokens)} tokens"
    if found.seconds is None or found.speed is None:
        return f"{text}. How long that takes is not known yet: no finetuning was measured on this engine."
    text = f"{text}, {span(found.seconds)} at the measured {number(found.speed.tokens_s)} tokens/s"
    if found.wait_s:
        text += f", after {span(found.wait_s)} of waiting"
    return f"{text}; done about {when(found.eta)}." if found.eta else f"{text}."


def _show_estimate(fields: Mapping[str, Any]) -> None:
    found = estimated(fields)
    if isinstance(found, HarliError):
        st.markdown(f":orange[:material/block: {plain(found.message)}]")
        return
    st.markdown(f":gray[{plain(estimate_text(found))}]")
    if found.memory.fits is False:
        st.markdown(f":red[:material/memory: it does not fit into memory: {plain(found.memory.reason)}]")
    for note in found.notes:
        if "not known" not in note:
            st.caption(f":material/info: {plain(note)}")


def adapter_hint(name: str, adapters: list[Adapter]) -> str:
    """What the name will mean: a new adapter, or a further version of one."""
    for adapter in adapters:
        if adapter.name == name:
            newest = max((version.version for version in adapter.versions), default=0)
            return f"Adds version {newest + 1} to the adapter `{name}`."
    return "Lower-case letters, digits, dots, dashes. Clients address the adapter by this name."


def draw(*, renew: bool = True) -> None:
    """The whole form; `submitted` tells the page when it has made a job. `renew`: what is submitted from now on is
    another job."""
    if renew and st.session_state.get(_FORM, {"opened": True})["opened"]:
        st.session_state[_FORM] = new_form(id=uuid.uuid4().hex, opened=False)
    with reading("data sets and adapters"):
        datasets, adapters = all_datasets(), all_adapters()
        limit = rank_limit()
        bases = [base.name for base in engine().base_models if base.refused is None]
    if not datasets:
        teach(
            "A job needs a data set",
            "Upload one on the **Data sets** page: JSON Lines, CSV or Parquet with questions and answers. "
            "A few hundred rows are enough for a style.",
            "harli datasets upload my-rows.jsonl",
            "curl -F file=@my-rows.jsonl '{api}/api/datasets?name=my-rows'",
        )
        return
    names = list(dict.fromkeys(dataset.name for dataset in datasets))
    fields: dict[str, Any] = {}
    left, right = st.columns([1.25, 1], gap="large")
    with left:
        fields["dataset"] = st.selectbox(
            "Data set", names, index=None, placeholder="Choose a data set", key=_PREFIX + "dataset", bind="query-params"
        )
        adapter = st.text_input(
            "Adapter name", key=_PREFIX + "adapter", bind="query-params", live="400ms", max_chars=63,
            placeholder="support-bot",
        )  # fmt: skip
        st.caption(adapter_hint(adapter.strip(), adapters))
        preset: Preset = st.segmented_control(
            "Preset", list(get_args(Preset)), default="balanced", required=True, key=_PREFIX + "preset",
            bind="query-params",
        )  # fmt: skip
        st.caption(_PRESET_HELP[preset])
    with right:
        st.text_input(
            "Job name (optional)", key=_PREFIX + "name", bind="query-params", live="400ms", max_chars=120,
            placeholder="made of adapter and data set",
        )  # fmt: skip
        if bases:
            fields["base"] = st.selectbox(
                "Base model", bases, index=None, placeholder="The served model", key=_PREFIX + "base",
                bind="query-params",
                help="Another model than the served one, whose layers are streamed from host memory: slower, and the "
                "adapter is stored, not served",
            )  # fmt: skip
        starts = [f"{item.name}@{version.version}" for item in adapters for version in reversed(item.versions)]
        fields["start"] = st.selectbox(
            "Start from", starts, index=None, placeholder="A fresh adapter", key=_PREFIX + "start", bind="query-params",
            help="An adapter to train further, which keeps its shape, or nothing for a fresh one",
        )  # fmt: skip
        st.toggle(
            "Deploy when done", value=defaults()["deploy"], key=_PREFIX + "deploy", bind="query-params",
            disabled=fields.get("base") is not None,
            help="Load the finished adapter into the engine, so that clients can use it at once",
        )  # fmt: skip
    chosen = next((dataset for dataset in datasets if dataset.name == fields["dataset"]), None)
    with st.expander("Expert settings", key="expert", icon=":material/tune:"):
        _expert(defaults(), _preset_values(preset, chosen), limit, shaped=fields["start"] is not None)
    with st.container(horizontal=True, vertical_alignment="center"):
        form = st.session_state[_FORM]
        submits = pressed(
            "Submit job", form, icon=":material/send:", key="submit_job", disabled=form["sending"] is not None
        )
        if chosen is not None:
            with st.container():
                _show_estimate(typed())
    if submits:
        submit()
        st.rerun()
    if form["sending"] is not None:
        wait(form, "Checking every row against the job's lengths …")
    show_faults("job_form")


def _preset_values(preset: Preset, dataset: Dataset | None) -> dict[str, Any]:
    """What the preset says of the fields that are left empty, for the chosen data set."""
    report = dataset.report if dataset is not None else None
    rows, tokens = (report.rows, report.tokens) if report is not None else (None, None)
    job, lora = JobCreate(dataset="-", adapter_name="x"), LoraBody()
    values = {name: getattr(job, name, None) for name in _BY_PRESET} | {"rank": lora.rank, "alpha": lora.alpha}
    chosen = presets.fields(preset, rows, tokens, settings().finetune.micro_batch_tokens)
    return {**values, **chosen.pop("lora", {}), **chosen}


def _expert(first: Mapping[str, Any], preset: Mapping[str, Any], limit: int, *, shaped: bool) -> None:
    """The fields that most jobs leave as they are. `first`: their first values; `preset`: what holds where nothing is
    given; `shaped`: the adapter that the job starts from says rank, alpha and modules."""

    def said(name: str) -> str:
        value = preset[name]
        return f"{value:g} (preset)" if value is not None else "preset"

    lora, optimizer, batches = st.columns(3, gap="medium")
    with lora:
        st.markdown("**LoRA**")
        _whole(
            "Rank", "rank", first, 1, limit, help=f"The engine serves adapters up to rank {limit}", disabled=shaped,
            placeholder=said("rank"),
        )  # fmt: skip
        _real(
            "Alpha", "alpha", first, 0.1, 1024.0, 1.0, "%.1f", help="The adapter's weight is alpha / rank",
            disabled=shaped, placeholder=said("alpha"),
        )  # fmt: skip
        _real("Dropout", "dropout", first, 0.0, 0.95, 0.05, "%.2f")
        st.multiselect(
            "Modules", first["modules"], default=first["modules"], key=_PREFIX + "modules", bind="query-params",
            help="The layers that get an adapter", disabled=shaped,
        )  # fmt: skip
        st.toggle(
            "rsLoRA", value=first["rslora"], key=_PREFIX + "rslora", bind="query-params",
            help="Scale by alpha / √rank, which keeps large ranks stable",
        )  # fmt: skip
        st.markdown("**Run**")
        _whole("Priority", "priority", first, -100, 100, help="Higher runs earlier; a tenant's quota bounds it")
        _whole("Seed", "seed", first, 0, 2**31 - 1)
        st.datetime_input(
            "Deadline", value=None, key=_PREFIX + "deadline", help="You are warned when the job will not keep it"
        )
    with optimizer:
        st.markdown("**Optimizer**")
        _real("Learning rate", "learning_rate", first, 1e-6, 1.0, 1e-4, "%.6f", placeholder=said("learning_rate"))
        st.selectbox(
            "Schedule", ["cosine", "linear", "constant"], key=_PREFIX + "schedule", bind="query-params",
            help="How the learning rate falls after the warm-up",
        )  # fmt: skip
        _real("Warm-up, share of steps", "warmup", first, 0.0, 0.99, 0.01, "%.2f")
        _real("Weight decay", "weight_decay", first, 0.0, 1.0, 0.01, "%.3f")
        _real("Largest gradient norm", "clip", first, 0.01, 100.0, 0.1, "%.2f")
    with batches:
        st.markdown("**Length and batches**")
        length = st.segmented_control(
            "Length in", ["epochs", "steps"], default=first["length"], required=True, key=_PREFIX + "length",
            bind="query-params",
        )  # fmt: skip
        by_steps = length == "steps"
        _whole("Optimizer steps", "steps", first, 1, 1_000_000, disabled=not by_steps)
        _real("Epochs", "epochs", first, 0.01, 1000.0, 0.5, "%.2f", disabled=by_steps, placeholder=said("epochs"))
        engine_default = f"{settings().finetune.micro_batch_tokens} (default)"
        _whole("Tokens per micro-batch", "micro_batch_tokens", first, 32, 65536, placeholder=engine_default)
        _whole("Micro-batches per step", "accumulation", first, 1, 1024)
        _whole(
            "Longest row, tokens", "sequence_length", first, 16, 65536, placeholder="micro-batch",
            help="At most a micro-batch; a data set with a longer row is refused",
        )  # fmt: skip
    with optimizer:
        st.markdown("**Evaluation and checkpoints**")
        _real(
            "Held out for evaluation", "evaluation_fraction", first, 0.0, 0.89, 0.01, "%.3f",
            placeholder=said("evaluation_fraction"),
        )  # fmt: skip
        _whole(
            "Evaluate every N steps", "evaluate_every", first, 0, 1_000_000, help="0: once, at the end",
            placeholder=said("evaluate_every"),
        )  # fmt: skip
        _whole("Checkpoint every N steps", "checkpoint_every", first, 1, 1_000_000)
    with batches:
        st.markdown("**Stopping and samples**")
        _whole(
            "Patience, evaluations", "patience", first, 0, 1000, placeholder=said("patience"),
            help="End after so many evaluations in a row without improvement; 0: never",
        )  # fmt: skip
        st.selectbox("Adapter to keep", list(_KEEP_BEST), key=_PREFIX + "keep_best", bind="query-params")
        st.text_area(
            "Prompts to try on the way", key=_PREFIX + "prompts", bind="query-params", height=90,
            placeholder="One per line; the adapter answers them at each evaluation",
        )  # fmt: skip


def _whole(label: str, name: str, first: Mapping[str, Any], low: int, high: int, **extra: Any) -> Any:
    return st.number_input(label, low, high, first[name], 1, key=_PREFIX + name, bind="query-params", **extra)


def _real(
    label: str, name: str, first: Mapping[str, Any], low: float, high: float, step: float, shown: str, **extra: Any
) -> Any:
    return st.number_input(label, low, high, first[name], step, shown, key=_PREFIX + name, bind="query-params", **extra)
