"""The form of a new job: its fields, the request they make, what they are estimated to cost."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from app.ui import job_form
from core.api.schemas import Adapter, AdapterVersion, Dataset, DatasetReport, Job, JobCreate
from core.errors import Invalid

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def fields(**given: Any) -> dict[str, Any]:
    return {**job_form.defaults(), "dataset": "rows", "adapter": "captain", **given}


def test_an_untouched_form_asks_for_the_defaults_of_the_api() -> None:
    made = job_form.request_of(fields())
    expected = JobCreate(dataset="rows", adapter_name="captain")
    assert made.model_dump(exclude={"epochs"}) == expected.model_dump(exclude={"epochs"})
    assert made.epochs == 3.0


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


@pytest.mark.parametrize("preset", list(job_form.PRESETS))
def test_a_preset_changes_fields_that_exist_into_a_valid_job(preset: job_form.Preset) -> None:
    changed = job_form.PRESETS[preset]
    assert changed.keys() <= job_form.defaults().keys()
    job_form.request_of(fields(**changed))


def test_a_clone_asks_for_the_same_job() -> None:
    spec = job_form.request_of(
        fields(length="steps", steps=9, rank=4, modules=["q_proj"], learning_rate=2e-4, seed=5, deploy=False)
    )
    job = Job(
        id="job_1", name="n", state="succeeded", spec=spec, dataset_id="ds_1", dataset_name="rows",
        adapter_name="captain", created_at=NOW,
    )  # fmt: skip
    assert job_form.request_of(job_form.fields_of(job)) == spec


def dataset(tokens: int | None) -> Dataset:
    report = DatasetReport(format="jsonl", rows=100, rows_read=100, tokens=tokens)
    return Dataset(id="ds_1", name="rows", version=1, created_at=NOW, bytes=1, sha256="0", report=report)


def test_the_estimate_counts_steps_tokens_and_time() -> None:
    text = job_form.estimate(dataset(10_000), fields(evaluation_fraction=0.0), 250, 100.0)
    assert text == "About 120 steps, 30,000 tokens, 5 min 0 s at the present finetuning speed."


def test_the_estimate_follows_steps_and_accumulation() -> None:
    chosen = fields(evaluation_fraction=0.0, length="steps", steps=10, accumulation=2)
    assert job_form.estimate(dataset(10_000), chosen, 250, 0.0) == "About 10 steps, 5,000 tokens."


def test_without_tokens_the_estimate_says_what_it_waits_for() -> None:
    assert "tokenizer" in job_form.estimate(dataset(None), fields(), 256, 0.0)


def test_a_known_name_becomes_a_further_version() -> None:
    version = AdapterVersion(
        version=2, created_at=NOW, origin="trained", rank=8, alpha=16, target_modules=[], bytes=1, sha256="0"
    )
    known = [Adapter(name="captain", created_at=NOW, versions=[version])]
    assert "version 3" in job_form.adapter_hint("captain", known)
    assert "version" not in job_form.adapter_hint("mate", known)
