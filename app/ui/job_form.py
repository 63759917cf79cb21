"""The form of a new job. Its fields live in the page's address, so that a refresh, a page switch or a bookmark keeps
what was filled in; a press, however often repeated, submits one job."""

from __future__ import annotations

import hashlib
import math
import uuid
from collections.abc import Mapping
from typing import Any, Literal

import streamlit as st
from pydantic import ValidationError

from app.ui.data import all_adapters, all_datasets, client, engine, live, settings
from app.ui.page import attempt, reading, show_faults, teach
from app.ui.text import number, plain, span
from core.api.schemas import Adapter, Dataset, Job, JobCreate, LoraBody
from core.errors import Invalid

_PREFIX = "new_"
_FORM = "_job_form"

Preset = Literal["quick", "balanced", "thorough"]
# What each changes. quick: does the data set do anything? thorough: more capacity, a lower rate for longer, with
# evaluations on the way.
PRESETS: dict[Preset, dict[str, Any]] = {
    "quick": {"epochs": 1.0},
    "balanced": {},
    "thorough": {"epochs": 5.0, "rank": 16, "alpha": 32.0, "learning_rate": 5e-4, "evaluate_every": 20},
}
_PRESET_FIELDS = frozenset(name for changed in PRESETS.values() for name in changed)
_PRESET_HELP: dict[Preset, str] = {
    "quick": "One epoch at the default rank: does the data set do anything?",
    "balanced": "Three epochs at the default rank: a sound first run.",
    "thorough": "Five epochs at twice the rank and half the learning rate, evaluated on the way.",
}


def defaults() -> dict[str, Any]:
    """Every field of the form with its first value, which is the API's own default where the API has one."""
    job, lora = JobCreate(dataset="-", adapter_name="x"), LoraBody()
    return {
        "dataset": None, "adapter": "", "name": "", "preset": "balanced", "start": None,
        "rank": lora.rank, "alpha": lora.alpha, "dropout": lora.dropout, "modules": list(lora.target_modules),
        "rslora": lora.use_rslora, "learning_rate": job.learning_rate, "schedule": job.schedule,
        "warmup": job.warmup_ratio, "weight_decay": job.weight_decay, "clip": job.max_grad_norm,
        "length": "epochs", "epochs": 3.0, "steps": 100,
        "micro_batch_tokens": job.micro_batch_tokens, "accumulation": job.accumulation,
        "sequence_length": job.sequence_length, "seed": job.seed, "evaluation_fraction": job.evaluation_fraction,
        "evaluate_every": job.evaluate_every, "checkpoint_every": job.checkpoint_every, "priority": job.priority,
        "deploy": job.deploy,
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
    lora = {"dropout": fields["dropout"], "use_rslora": fields["rslora"]}
    if fields["start"] is None:
        # An adapter that is trained further keeps its shape; what is not given is taken from it.
        lora |= {"rank": fields["rank"], "alpha": fields["alpha"], "target_modules": fields["modules"]}
    try:
        return JobCreate(
            dataset=fields["dataset"],
            adapter_name=fields["adapter"].strip(),
            name=fields["name"].strip() or None,
            initial_adapter=fields["start"],
            lora=LoraBody(**lora),
            learning_rate=fields["learning_rate"],
            schedule=fields["schedule"],
            warmup_ratio=fields["warmup"],
            weight_decay=fields["weight_decay"],
            max_grad_norm=fields["clip"],
            epochs=None if by_steps else fields["epochs"],
            max_steps=fields["steps"] if by_steps else None,
            micro_batch_tokens=fields["micro_batch_tokens"],
            accumulation=fields["accumulation"],
            sequence_length=fields["sequence_length"],
            seed=fields["seed"],
            evaluation_fraction=fields["evaluation_fraction"],
            evaluate_every=fields["evaluate_every"],
            checkpoint_every=fields["checkpoint_every"],
            priority=fields["priority"],
            deploy=fields["deploy"],
        )
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in fault["loc"])
        raise Invalid("invalid_request", f"{place}: {fault['msg']} (got {fault['input']!r})", place) from error


def fields_of(job: Job) -> dict[str, Any]:
    """The form filled as it was for `job`."""
    spec = job.spec
    return {
        **defaults(),
        "dataset": job.dataset_name, "adapter": spec.adapter_name, "name": spec.name or "",
        "start": spec.initial_adapter,
        "rank": spec.lora.rank, "alpha": spec.lora.alpha, "dropout": spec.lora.dropout,
        "modules": list(spec.lora.target_modules), "rslora": spec.lora.use_rslora, "learning_rate": spec.learning_rate,
        "schedule": spec.schedule, "warmup": spec.warmup_ratio, "weight_decay": spec.weight_decay,
        "clip": spec.max_grad_norm, "length": "steps" if spec.max_steps else "epochs",
        "epochs": spec.epochs or defaults()["epochs"], "steps": spec.max_steps or defaults()["steps"],
        "micro_batch_tokens": spec.micro_batch_tokens, "accumulation": spec.accumulation,
        "sequence_length": spec.sequence_length, "seed": spec.seed, "evaluation_fraction": spec.evaluation_fraction,
        "evaluate_every": spec.evaluate_every, "checkpoint_every": spec.checkpoint_every, "priority": spec.priority,
        "deploy": spec.deploy,
    }  # fmt: skip


def key_of(name: str, preset: Preset) -> str:
    """The field's key in the session and in the address. What presets differ in, each keeps for itself: pressing one
    fills in nothing that could be lost on the way."""
    return f"{_PREFIX}{preset}_{name}" if name in _PRESET_FIELDS else _PREFIX + name


def values_of(preset: Preset) -> dict[str, Any]:
    """The fields' first values under the preset, within what the engine can serve."""
    values = {**defaults(), **PRESETS[preset], "preset": preset}
    return {**values, "rank": min(values["rank"], rank_limit())}


def fill(fields: Mapping[str, Any]) -> None:
    """Put values into the form; before it is drawn in this run."""
    for name, value in fields.items():
        st.session_state[key_of(name, fields["preset"])] = value


def empty() -> None:
    """Put the first values into the form, under every preset; before it is drawn in this run."""
    for preset in PRESETS:
        fill(values_of(preset))
    fill(defaults())


def typed() -> dict[str, Any]:
    """What the form holds now."""
    preset: Preset = st.session_state[_PREFIX + "preset"]
    return {name: st.session_state.get(key_of(name, preset), value) for name, value in values_of(preset).items()}


def rank_limit() -> int:
    """The largest rank that the engine can serve, as far as it is known."""
    return engine().max_lora_rank or 256


def submit() -> None:
    """Submit what the form holds. A second press of the same form finds the first one's job."""
    form = st.session_state[_FORM]
    if form["job"] is not None:
        return

    def send() -> None:
        request = request_of(typed())
        content = hashlib.sha256(request.model_dump_json().encode()).hexdigest()[:16]
        job = client().submit_job(request, idempotency_key=f"{form['id']}-{content}")
        form["job"] = job.id

    attempt("Submitting the job", send, "Job submitted", place="job_form")


def submitted() -> str | None:
    """The job that the form's press has made, said once. The form is then drawn empty, which takes its fields out of
    the address, before the job is opened; until then a further press still finds the job."""
    form = st.session_state.get(_FORM)
    if form is None or form["job"] is None or form["opened"]:
        return None
    form["opened"] = True
    empty()
    made: str = form["job"]
    return made


def estimate(dataset: Dataset, fields: Mapping[str, Any], micro_batch_tokens: int, tokens_s: float) -> str:
    """Optimizer steps, tokens and (while finetuning runs) time that the job will take, in words."""
    if dataset.report.tokens is None:
        return "The number of steps is known once the engine's tokenizer is."
    trained = dataset.report.tokens * (1 - fields["evaluation_fraction"])
    per_step = (fields["micro_batch_tokens"] or micro_batch_tokens) * fields["accumulation"]
    per_epoch = math.ceil(trained / per_step)
    steps = fields["steps"] if fields["length"] == "steps" else math.ceil(per_epoch * fields["epochs"])
    tokens = trained * steps / per_epoch
    text = f"About {number(steps)} steps, {number(tokens)} tokens"
    return f"{text}, {span(tokens / tokens_s)} at the present finetuning speed." if tokens_s > 0 else f"{text}."


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
        st.session_state[_FORM] = {"id": uuid.uuid4().hex, "job": None, "opened": False}
    with reading("data sets and adapters"):
        datasets, adapters = all_datasets(), all_adapters()
        limit, now = rank_limit(), live()
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
            "Preset", list(PRESETS), default="balanced", required=True, key=_PREFIX + "preset", bind="query-params",
        )  # fmt: skip
        st.caption(_PRESET_HELP[preset])
    with right:
        st.text_input(
            "Job name (optional)", key=_PREFIX + "name", bind="query-params", live="400ms", max_chars=120,
            placeholder="the adapter's name",
        )  # fmt: skip
        starts = [f"{item.name}@{version.version}" for item in adapters for version in reversed(item.versions)]
        fields["start"] = st.selectbox(
            "Start from", starts, index=None, placeholder="The base model", key=_PREFIX + "start", bind="query-params",
            help="An adapter to train further, which keeps its shape, or nothing for a fresh one",
        )  # fmt: skip
        st.toggle(
            "Deploy when done", value=defaults()["deploy"], key=_PREFIX + "deploy", bind="query-params",
            help="Load the finished adapter into the engine, so that clients can use it at once",
        )  # fmt: skip
    with st.expander("Expert settings", key="expert", icon=":material/tune:"):
        fields |= _expert(values_of(preset), limit, shaped=fields["start"] is not None)
    chosen = next((dataset for dataset in datasets if dataset.name == fields["dataset"]), None)
    with st.container(horizontal=True, vertical_alignment="center"):
        pressed = st.button("Submit job", type="primary", icon=":material/send:", key="submit_job")
        if chosen is not None:
            tokens_s = now.window.finetune_tokens_s if now.window else 0.0
            st.markdown(f":gray[{plain(estimate(chosen, fields, settings().finetune.micro_batch_tokens, tokens_s))}]")
    if pressed:
        with st.spinner("Checking every row against the job's lengths …"):
            submit()
        form = st.session_state[_FORM]
        if form["job"] is not None and not form["opened"]:
            st.rerun()
    show_faults("job_form")


def _expert(first: Mapping[str, Any], limit: int, *, shaped: bool) -> dict[str, Any]:
    """The fields that a preset fills; what `estimate` needs of them is returned. `shaped`: the adapter that the job
    starts from says rank, alpha and modules."""
    fields: dict[str, Any] = {}
    lora, optimizer, batches = st.columns(3, gap="medium")
    with lora:
        st.markdown("**LoRA**")
        _whole("Rank", "rank", first, 1, limit, help=f"The engine serves adapters up to rank {limit}", disabled=shaped)
        _real(
            "Alpha", "alpha", first, 0.1, 1024.0, 1.0, "%.1f", help="The adapter's weight is alpha / rank",
            disabled=shaped,
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
        _whole("Priority", "priority", first, -100, 100, help="Higher runs earlier")
        _whole("Seed", "seed", first, 0, 2**31 - 1)
    with optimizer:
        st.markdown("**Optimizer**")
        _real("Learning rate", "learning_rate", first, 1e-6, 1.0, 1e-4, "%.6f")
        st.selectbox(
            "Schedule", ["cosine", "linear", "constant"], key=_PREFIX + "schedule", bind="query-params",
            help="How the learning rate falls after the warm-up",
        )  # fmt: skip
        _real("Warm-up, share of steps", "warmup", first, 0.0, 0.99, 0.01, "%.2f")
        _real("Weight decay", "weight_decay", first, 0.0, 1.0, 0.01, "%.3f")
        _real("Largest gradient norm", "clip", first, 0.01, 100.0, 0.1, "%.2f")
    with batches:
        st.markdown("**Length and batches**")
        fields["length"] = st.segmented_control(
            "Length in", ["epochs", "steps"], default=first["length"], required=True, key=_PREFIX + "length",
            bind="query-params",
        )  # fmt: skip
        by_steps = fields["length"] == "steps"
        fields["steps"] = _whole("Optimizer steps", "steps", first, 1, 1_000_000, disabled=not by_steps)
        fields["epochs"] = _real("Epochs", "epochs", first, 0.01, 1000.0, 0.5, "%.2f", disabled=by_steps)
        engine_default = f"{settings().finetune.micro_batch_tokens} (default)"
        fields["micro_batch_tokens"] = _whole(
            "Tokens per micro-batch", "micro_batch_tokens", first, 32, 65536, placeholder=engine_default
        )
        fields["accumulation"] = _whole("Micro-batches per step", "accumulation", first, 1, 1024)
        _whole(
            "Longest row, tokens", "sequence_length", first, 16, 65536, placeholder="micro-batch",
            help="At most a micro-batch; a data set with a longer row is refused",
        )  # fmt: skip
    with optimizer:
        st.markdown("**Evaluation and checkpoints**")
        fields["evaluation_fraction"] = _real(
            "Held out for evaluation", "evaluation_fraction", first, 0.0, 0.89, 0.01, "%.2f"
        )
        _whole("Evaluate every N steps", "evaluate_every", first, 0, 1_000_000, help="0: once, at the end")
        _whole("Checkpoint every N steps", "checkpoint_every", first, 1, 1_000_000)
    return fields


def _whole(label: str, name: str, first: Mapping[str, Any], low: int, high: int, **extra: Any) -> Any:
    return st.number_input(
        label, low, high, first[name], 1, key=key_of(name, first["preset"]), bind="query-params", **extra
    )


def _real(
    label: str, name: str, first: Mapping[str, Any], low: float, high: float, step: float, shown: str, **extra: Any
) -> Any:
    return st.number_input(
        label, low, high, first[name], step, shown, key=key_of(name, first["preset"]), bind="query-params", **extra
    )
