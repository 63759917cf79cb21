"""Every notebook that needs a running Harli runs from top to bottom, with small parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from safetensors.torch import save_file

from core.api.schemas import Job
from tests.notebooks.running import run
from tests.stack import Stack, environment, until

_STAMPED = re.compile(r"captain-\d{8}-\d{6}$")


@pytest.fixture
def settings_of_the_stack(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels find the stack as a user's would; targets and jobs are afterwards as they were."""
    for name, value in environment(stack.settings).items():
        monkeypatch.setenv(name, value)
    targets = stack.client.targets().targets
    yield

    def going() -> list[Job]:
        return [job for job in stack.client.jobs().items if job.state in ("queued", "starting", "running", "saving")]

    try:
        assert stack.client.targets().targets == targets
        until(lambda: not going(), 180, "the end of the notebook's jobs")
    finally:
        for job in going():
            stack.client.stop_job(job.id)


@pytest.fixture
def adapter(stack: Stack, tmp_path: Path) -> Iterator[str]:
    """An uploaded adapter that the engine can serve."""
    config = json.loads((Path(stack.settings.engine.model or "") / "config.json").read_text())
    folder = tmp_path / f"random-{uuid4().hex[:6]}"
    folder.mkdir()
    hidden, rank = config["hidden_size"], 4
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.o_proj.lora_{side}.weight": torch.randn(
            shape, generator=generator
        )
        * 0.02
        for layer in range(config["num_hidden_layers"])
        for side, shape in (("A", (rank, hidden)), ("B", (hidden, rank)))
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 8, "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    yield stack.client.upload_adapter(folder).name
    stack.client.delete_adapter(folder.name)


@pytest.mark.engine
@pytest.mark.usefixtures("settings_of_the_stack")
def test_the_journey_ends_with_an_adapter_that_answers(stack: Stack) -> None:
    text = run("journey", steps=2, measure_s=1, pause_s=10)
    assert "217 of 217 read" in text
    assert "in force in the engine after" in text
    (job,) = [job for job in stack.client.jobs(state="succeeded").items if _STAMPED.match(job.adapter_name)]
    assert job.first_loss is not None
    assert job.loss is not None
    assert job.loss < job.first_loss
    assert "Where is Madrid?" in text


@pytest.mark.engine
@pytest.mark.usefixtures("settings_of_the_stack")
def test_adapters_are_compared_with_the_base_model(stack: Stack, adapter: str) -> None:
    text = run("compare_adapters", names=[adapter], questions=2, max_tokens=8)
    assert f"{adapter}@1" in text
    assert "SmolLM2-135M-Instruct" in text


@pytest.mark.engine
@pytest.mark.usefixtures("settings_of_the_stack")
def test_the_frontier_is_measured_target_by_target(stack: Stack) -> None:
    text = run("slo_frontier", factors=(1.5, 6.0), seconds=3, settle_s=1, clients=1)
    assert "finetune_tokens_s" in text


@pytest.mark.engine
@pytest.mark.usefixtures("settings_of_the_stack")
def test_the_slider_moves_the_target_in_the_engine(stack: Stack) -> None:
    text = run("live_targets", seconds=8, clients=1)
    assert len(re.findall(r"target [\d.]+ ms: finetuning", text)) == 2
    assert "targets as before" in text
