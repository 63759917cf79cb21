"""The form of a new job: its fields, the request they make, what they are estimated to cost."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from app.ui import job_form
from core.api import presets
from core.api.job_schemas import JobEstimate, MemoryEstimate, Speed
from core.api.schemas import Adapter, AdapterVersion, Dataset, DatasetReport, Job, JobCreate, Preset
from core.errors import Invalid

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def fields(**given: Any) -> dict[str, Any]:
    return {**job_form.defaults(), "dataset": "rows", "adapter": "captain", **given}


def test_an_untouched_form_asks_for_the_defaults_of_the_api() -> None:
    made = job_form.request_of(fields())
    expected = JobCreate(dataset="rows", adapter_name="captain", preset="balanced")
    assert made == expected
    assert not {"epochs", "learning_rate", "patience", "keep_best"} & made.model_fields_set, "the preset says these"


@pytest.mark.parametrize(("missing", "param"), [({"dataset": None}, "dataset"), ({"adapter": " "}, "adapter_name")])
def test_what_is_missing_is_named(missing: dict[str, Any], param: str) -> None:
    with pytest.raises(Invalid) as caught:
        job_form.request_of(fields(**missing))
    assert caught.value.param == param


def test_a_bad_name_is_refused_with_its_field() -> None:
    with pytest.raises(Invalid) as caught:
        job_form.request_of(fields(adapter="Captain Hook"))
    assert caught.value.param == "adapter_name"
    assert "Captain Hook" in caught.value.message


def test_steps_replace_epochs() -> None:
    made = job_form.request_of(fields(length="steps", steps=7))
    assert (made.max_steps, made.epochs) == (7, None)


def test_an_adapter_to_go_on_from_brings_its_shape() -> None:
    made = job_form.request_of(fields(start="captain@1", rank=4))
    assert made.initial_adapter == "captain@1"
    assert made.lora.model_fields_set == {"dropout", "use_rslora"}


@pytest.mark.parametrize("preset", ["quick", "balanced", "thorough"])
def test_what_the_fields_promise_of_a_preset_is_what_the_api_makes_of_it(preset: Preset) -> None:
    made = job_form.request_of(fields(preset=preset))
    applied = presets.applied(made, 400, 20_000, micro_batch_tokens=256, max_rank=16)
    shown = job_form._preset_values(preset, dataset(20_000, rows=400))
    assert {name: getattr(applied.lora, name) for name in ("rank", "alpha")} == {
        name: shown.pop(name) for name in ("rank", "alpha")
    }
    assert {name: getattr(applied, name) for name in shown} == shown


def test_what_is_typed_goes_before_the_preset() -> None:
    made = job_form.request_of(fields(preset="thorough", rank=4, patience=0, keep_best="the last one", epochs=2.0))
    assert (made.lora.rank, made.patience, made.keep_best, made.epochs) == (4, 0, False, 2.0)
    assert {"patience", "keep_best", "epochs"} <= made.model_fields_set


def test_another_base_is_asked_for_without_a_word_on_deploying() -> None:
    made = job_form.request_of(fields(base="other"))
    assert made.base_model == "other" and "deploy" not in made.model_fields_set
    job = Job(
        id="job_1", name="n", state="succeeded", spec=made.model_copy(update={"deploy": False}), dataset_id="ds_1",
        dataset_name="rows", adapter_name="captain", created_at=NOW,
    )  # fmt: skip
    again = job_form.request_of(job_form.fields_of(job))
    assert again.base_model == "other" and "deploy" not in again.model_fields_set


def test_prompts_are_lines() -> None:
    assert job_form.request_of(fields(prompts="Ahoy?\n\n Whither? \n")).sample_prompts == ["Ahoy?", "Whither?"]


def test_a_clone_asks_for_the_same_job() -> None:
    spec = job_form.request_of(
        fields(
            length="steps",
            steps=9,
            rank=4,
            modules=["q_proj"],
            learning_rate=2e-4,
            seed=5,
            deploy=False,
            evaluate_every=3,
            patience=2,
            keep_best="the best evaluated",
            prompts="Ahoy?",
        )
    )
    job = Job(
        id="job_1", name="n", state="succeeded", spec=spec, dataset_id="ds_1", dataset_name="rows",
        adapter_name="captain", created_at=NOW,
    )  # fmt: skip
    assert job_form.request_of(job_form.fields_of(job)) == spec.model_copy(update={"preset": "balanced"})


def dataset(tokens: int | None, rows: int = 100) -> Dataset:
    report = DatasetReport(format="jsonl", rows=rows, rows_read=rows, tokens=tokens)
    return Dataset(
        id="ds_1", name="rows", version=1, created_at=NOW, bytes=1, sha256="0", report=report, tenant="default"
    )


def estimate(**found: Any) -> JobEstimate:
    spec = JobCreate(dataset="rows", adapter_name="captain")
    memory = MemoryEstimate(fits=None, reason="not known")
    return JobEstimate.model_validate({"spec": spec, "rows": 9, "training_rows": 9, "memory": memory, **found})


def test_the_estimate_tells_steps_tokens_and_measured_time() -> None:
    speed = Speed(tokens_s=100, seconds=60, measured_at=NOW)
    text = job_form.estimate_text(estimate(steps=120, tokens=30_000, seconds=300, speed=speed, wait_s=60))
    assert text == "About 120 steps, 30,000 tokens, 5 min 0 s at the measured 100 tokens/s, after 1 min 0 s of waiting."


def test_what_was_not_measured_is_said_to_be_unknown() -> None:
    assert "not known yet" in job_form.estimate_text(estimate(steps=120, tokens=30_000))
    assert "tokenizer" in job_form.estimate_text(estimate())


def test_a_known_name_becomes_a_further_version() -> None:
    version = AdapterVersion(
        version=2, created_at=NOW, origin="trained", rank=8, alpha=16, target_modules=[], bytes=1, sha256="0"
    )
    known = [Adapter(name="captain", created_at=NOW, versions=[version])]
    assert "version 3" in job_form.adapter_hint("captain", known)
    assert "version" not in job_form.adapter_hint("mate", known)
