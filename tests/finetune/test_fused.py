"""The fused step's own backward: the losses, gradients and weights of Hugging Face + peft."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from benchmarks import plain_loop
from core.errors import Invalid
from core.finetune import lora, views
from core.finetune.fused import FusedStep, FusedWeights, Work, pack_inputs
from core.finetune.views import UnsupportedWeights
from core.intake import packing
from core.intake.packing import MicroBatch
from core.link.messages import LoraSpec
from tests.finetune import small

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
TOKENS = 32


def batches(count: int, tokens: int = TOKENS, seed: int = 0) -> list[MicroBatch]:
    rows = small.rows(seed=seed)
    plan = packing.epoch_plan([len(row.ids) for row in rows], tokens, seed=seed, epoch=0)
    return [packing.build([rows[i] for i in plan[n % len(plan)]], tokens) for n in range(count)]


def weights(source: PreTrainedModel, path: Path) -> FusedWeights:
    served = small.Served(source)
    return FusedWeights.of(served, views.shared_model(served, small.folder(source, path)))


def randomised(source: PreTrainedModel, spec: LoraSpec) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A peft model with B factors other than zero, so that every path has a gradient."""
    wrapped = lora.wrap(source, spec, seed=1, base_name="small")
    with torch.no_grad():
        for parameter in lora.trainable(wrapped).values():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return wrapped, {name: p.detach().clone() for name, p in lora.trainable(wrapped).items()}


def load(step: FusedStep, parameters: dict[str, torch.Tensor], scaling: float, trained: int, rate: float = 0.0) -> None:
    step.lora.load(step.lora.masters, parameters)
    step.buffers.scalars.copy_(torch.tensor([rate, 0.0, 1e9, scaling, 1.0 / trained]))
    step.publish()


def run(step: FusedStep, batch: MicroBatch) -> None:
    step.buffers.inputs.copy_(pack_inputs(batch, step.buffers.inputs.shape[1]))
    for work in step.micro_batch(batch.trained):
        step.run(work)


def expected_gradients(wrapped: torch.nn.Module, batch: MicroBatch) -> tuple[float, dict[str, torch.Tensor]]:
    loss = plain_loop._loss(wrapped, batch) / batch.trained
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in lora.trainable(wrapped).items()}


def check(step: FusedStep, spec: LoraSpec, loss: float, expected: dict[str, torch.Tensor]) -> None:
    scaling = spec.alpha / spec.rank
    assert float(step.buffers.loss) == pytest.approx(loss, rel=1e-5)
    mine = dict(step.lora.named(step.lora.gradient))
    for name, gradient in expected.items():
        value = mine[name][: gradient.shape[0], : gradient.shape[1]] * (scaling if "lora_B" in name else 1.0)
        torch.testing.assert_close(value, gradient, rtol=1e-3, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_peft(family: str, recompute: bool, tmp_path: Path) -> None:
    spec = LoraSpec(rank=4, alpha=6.0)
    source = small.model(family, tied=family != "qwen3")
    step = FusedStep(weights(source, tmp_path), rank=4, micro_batch_tokens=TOKENS, recompute=recompute)
    wrapped, parameters = randomised(source, spec)
    (batch,) = batches(1)
    assert batch.tokens < TOKENS and len(set(batch.segments)) > 2  # rows and padding
    load(step, parameters, 1.5, batch.trained)
    run(step, batch)
    check(step, spec, *expected_gradients(wrapped, batch))


@pytest.mark.parametrize(
    "modules", [("q_proj", "v_proj"), ("k_proj", "o_proj"), ("gate_proj",), ("up_proj", "down_proj")]
)
def test_modules_and_ranks_that_a_job_does_not_have_stay_zero(modules: tuple[str, ...], tmp_path: Path) -> None:
    spec = LoraSpec(rank=3, alpha=6.0, target_modules=modules)
    source = small.model("qwen2")
    step = FusedStep(weights(source, tmp_path), rank=4, micro_batch_tokens=TOKENS)
    wrapped, parameters = randomised(source, spec)
    (batch,) = batches(1)
    load(step, parameters, 2.0, batch.trained, rate=0.01)
    run(step, batch)
    check(step, spec, *expected_gradients(wrapped, batch))
    step.run(Work("optimizer"))
    for name, master in step.lora.named(step.lora.masters):
        own = parameters.get(name)
        outside = master.clone()
        if own is not None:
            corner = outside[: own.shape[0], : own.shape[1]]
            assert not torch.equal(corner, own)
            corner.zero_()
        assert not outside.any(), name


def test_gradients_accumulate_over_micro_batches(tmp_path: Path) -> None:
    spec = LoraSpec(rank=4, alpha=8.0)
    source = small.model()
    step = FusedStep(weights(source, tmp_path), rank=4, micro_batch_tokens=TOKENS)
    wrapped, parameters = randomised(source, spec)
    pair = batches(2)
    trained = sum(batch.trained for batch in pair)
    load(step, parameters, 2.0, trained)
    loss = 0.0
    for batch in pair:
        run(step, batch)
        value = plain_loop._loss(wrapped, batch) / trained
        value.backward()
        loss += float(value.detach())
    check(step, spec, loss, {name: p.grad for name, p in lora.trainable(wrapped).items()})


def test_a_head_in_chunks_leaves_out_what_is_not_trained(tmp_path: Path) -> None:
    spec = LoraSpec(rank=4, alpha=8.0)
    source = small.model(vocabulary=1024)
    step = FusedStep(weights(source, tmp_path), rank=4, micro_batch_tokens=256)
    assert step.buffers.head_chunks == 4
    wrapped, parameters = randomised(source, spec)
    (batch,) = batches(1, 256)
    heads = [work for work in step.micro_batch(batch.trained) if work.name == "head"]
    assert len(heads) == math.ceil(batch.trained / step.buffers.head_chunk) < 4
    load(step, parameters, 2.0, batch.trained)
    run(step, batch)
    check(step, spec, *expected_gradients(wrapped, batch))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 1e-2)])
def test_losses_and_weights_over_20_steps_are_those_of_a_plain_loop(
    dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    pairs = [batches(2, seed=n) for n in range(20)]
    source = small.model(dtype=dtype)
    step = FusedStep(weights(source, tmp_path), rank=4, micro_batch_tokens=TOKENS)
    plain = plain_loop.train(source, pairs, rank=4, alpha=8.0, learning_rate=1e-2, max_grad_norm=1.0, seed=0)
    step.lora.load(step.lora.masters, plain.initial)
    losses = []
    for number, pair in enumerate(pairs):
        rate = 1e-2 * 0.5 * (1 + math.cos(math.pi * number / len(pairs)))
        trained = sum(batch.trained for batch in pair)
        step.buffers.scalars.copy_(torch.tensor([rate, 0.0, 1.0, 2.0, 1.0 / trained]))
        if number == 0:
            step.publish()
        for batch in pair:
            run(step, batch)
        step.run(Work("optimizer"))
        losses.append(float(step.buffers.report[0]))
    assert losses == pytest.approx(plain.losses, rel=tolerance)
    difference = moved = 0.0
    for name, master in step.lora.named(step.lora.masters):
        difference += float((master - plain.final[name]).square().sum())
        moved += float((plain.final[name] - plain.initial[name]).square().sum())
    assert math.sqrt(difference / moved) < (0.01 if dtype == torch.float32 else 0.1)


def test_an_update_whose_gradient_is_no_number_is_left_out(tmp_path: Path) -> None:
    source = small.model()
    step = FusedStep(weights(source, tmp_path), rank=4, micro_batch_tokens=TOKENS)
    _, parameters = randomised(source, LoraSpec(rank=4))
    load(step, parameters, 2.0, 1, rate=0.1)
    before = step.lora.masters.clone()
    step.lora.gradient[5] = torch.nan
    step.run(Work("optimizer"))
    assert torch.equal(step.lora.masters, before)
    assert float(step.lora.step) == 0
    assert math.isnan(float(step.buffers.report[1]))
    assert not step.lora.gradient.any()


def test_inputs_say_where_each_packed_row_begins_and_ends() -> None:
    (batch,) = batches(1)
    packed = pack_inputs(batch, TOKENS).numpy()
    for place in range(TOKENS):
        same = np.flatnonzero(batch.segments == batch.segments[place])
        assert (packed[2, place], packed[3, place]) == (same[0], same[-1] + 1)
    assert list(packed[4][: batch.trained]) == list(np.flatnonzero(batch.labels >= 0))
    assert set(packed[4][batch.trained :]) == {TOKENS}


def test_a_rank_that_the_slot_does_not_hold_is_refused(tmp_path: Path) -> None:
    source = small.model()
    step = FusedStep(weights(source, tmp_path), rank=4, micro_batch_tokens=TOKENS)
    _, parameters = randomised(source, LoraSpec(rank=8))
    with pytest.raises(Invalid, match="rank 4 or less"):
        step.lora.load(step.lora.masters, parameters)


def test_a_bias_that_the_layer_does_not_have_is_refused(tmp_path: Path) -> None:
    source = small.model()
    served = small.Served(source)
    model = views.shared_model(served, small.folder(source, tmp_path))
    served.model.layers.get_submodule("0").self_attn.o_proj.bias = torch.nn.Parameter(torch.zeros(32))
    with pytest.raises(UnsupportedWeights, match=r"o_proj\.bias"):
        FusedWeights.of(served, model)
