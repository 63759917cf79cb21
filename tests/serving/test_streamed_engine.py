"""A job on a base that the engine does not serve, in the real engine: its layers go through a window of the arena."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from core.finetune.trainer import Trainer
from core.intake import packing, tokenizer
from core.link.messages import Hello, JobUpdate, StopJob
from tests.serving.conftest import Engine
from tests.serving.test_elastic_engine import batch, memory, of_jobs
from tests.serving.test_engine import spec

pytestmark = pytest.mark.engine


def told(engine: Engine, job_id: str) -> list[float]:
    """The losses of a job's steps."""
    return [
        message.loss
        for message in engine.received
        if isinstance(message, JobUpdate) and message.job_id == job_id and message.loss is not None
    ]


def test_the_bases_that_jobs_may_name_are_announced_with_what_is_wrong_with_them(
    engine: Engine, other_base: Path
) -> None:
    hello = next(message for message in engine.received if isinstance(message, Hello))
    usable, copy, gone = hello.base_models
    assert (usable.name, usable.path, usable.refused) == ("other-base", str(other_base), None)
    assert (usable.layers, usable.window_layers) == (5, 2) and usable.window_bytes < usable.host_bytes
    assert (copy.name, copy.layers, copy.parameters) == ("copy", 30, hello.parameters)
    assert gone.name == "gone" and gone.refused is not None and "HARLI_FINETUNE__BASE_MODELS" in gone.refused


def test_a_job_on_another_base_trains_as_one_that_has_it_whole_and_gives_its_memory_back(
    engine: Engine, captain: Path, other_base: Path, tmp_path: Path
) -> None:
    engine.pending.clear()
    served = batch(engine)
    whole = memory(engine, lambda view: view.kv_tokens == view.kv_most_tokens)
    engine.train_beside_decode(version=41)
    job = spec(captain, tmp_path / "other", base_model="other-base", max_steps=8)
    engine.run(job, token=41)
    started = engine.update("started", job.job_id)
    assert "base other-base: 5 layers go through a window of 2 (" in (started.message or "")
    assert batch(engine) == served
    path = engine.update("succeeded", job.job_id).path
    assert path is not None

    model = AutoModelForCausalLM.from_pretrained(other_base).requires_grad_(False).eval()
    rows = packing.load_encoded(captain, tokenizer.load(other_base))
    plain = Trainer(model, job, rows, base_name="other-base")
    while not plain.done:
        plain.run_next()
    assert told(engine, job.job_id) == pytest.approx([metric.loss for metric in plain.take_metrics()], rel=1e-4)
    assert json.loads((Path(path) / "adapter_config.json").read_text())["base_model_name_or_path"] == "other-base"

    after = memory(engine, lambda view: view.kv_tokens == view.kv_most_tokens)
    assert (of_jobs(after), after.used_bytes) == (0, whole.used_bytes)


def test_a_copy_of_the_served_model_that_is_streamed_is_trained_as_the_served_one(
    engine: Engine, captain: Path, tmp_path: Path
) -> None:
    """To the last bit: the same products of the same numbers."""
    losses = []
    for token, base in ((44, None), (45, "copy")):
        job = spec(captain, tmp_path / f"base-{base}", base_model=base, max_steps=2)
        engine.run(job, token=token)
        engine.update("succeeded", job.job_id, 300)
        losses.append(
            [m.loss for m in engine.received if isinstance(m, JobUpdate) and m.job_id == job.job_id and m.loss]
        )
    assert len(losses[0]) == 2 and losses[1] == losses[0]


def test_a_job_on_another_base_that_is_stopped_gives_its_memory_back(
    engine: Engine, captain: Path, tmp_path: Path
) -> None:
    engine.pending.clear()
    whole = memory(engine, lambda view: view.kv_tokens == view.kv_most_tokens)
    job = spec(captain, tmp_path / "stopped", base_model="other-base", max_steps=5000)
    engine.run(job, token=42)
    engine.update("metric", job.job_id)
    held = memory(engine, lambda view: of_jobs(view) > 0)
    window = next(m for m in engine.received if isinstance(m, Hello)).base_models[0].window_bytes
    assert of_jobs(held) >= window
    engine.send(StopJob(job_id=job.job_id, token=42))
    engine.update("cancelled", job.job_id)
    after = memory(engine, lambda view: view.kv_tokens == view.kv_most_tokens)
    assert (of_jobs(after), after.used_bytes) == (0, whole.used_bytes)


@pytest.mark.parametrize(("name", "why"), [("gone", "there is no folder"), ("nobody", "HARLI_FINETUNE__BASE_MODELS")])
def test_a_job_on_a_base_that_cannot_be_had_fails_with_the_reason(
    name: str, why: str, engine: Engine, captain: Path, tmp_path: Path
) -> None:
    job = spec(captain, tmp_path / name, base_model=name)
    engine.run(job, token=43)
    failed = engine.update("failed", job.job_id)
    assert (failed.code, failed.param) == ("base_model", "base_model")
    assert f"base model {name} cannot be finetuned" in (failed.message or "") and why in (failed.message or "")
