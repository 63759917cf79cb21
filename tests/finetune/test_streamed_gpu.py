"""A base that is streamed to a GPU: what a trainer computes that has it whole, captured tasklets to the last bit,
however copies and tasklets run ahead of each other."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from core.finetune import base_folder, views
from core.finetune.captured import CapturedTrainer, Slot, StepResult
from core.finetune.fused import FusedWeights
from core.finetune.streamed import StreamedBase
from core.finetune.trainer import Trainer
from core.intake.packing import MicroBatch
from core.memory.arena import open_arena
from core.memory.rate import Rate
from core.memory.slot import SlotMemory, TorchMemory
from tests.finetune import small
from tests.finetune.test_captured import RANK, RATE, TOKENS, batches, parameters

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
LAYERS, STEPS = 6, 6


def source() -> PreTrainedModel:
    config = AutoConfig.for_model(
        "qwen3", hidden_size=512, intermediate_size=1536, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, vocab_size=2048, max_position_embeddings=1024, tie_word_embeddings=False,
        pad_token_id=0, architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" not in name:
                torch.nn.init.normal_(parameter, std=0.06)
    return made.requires_grad_(False)


def run(
    trainer: CapturedTrainer, steps: Sequence[Sequence[MicroBatch]], seed: int, give_up: Callable[[int, int], bool]
) -> list[StepResult]:
    """Every tasklet on a stream drawn at random, as soon as it may be launched; `give_up` (step, tasklet): begin the
    step again there, once."""
    draw, last, results = random.Random(seed), 0, []
    for number, step in enumerate(steps):
        kinds = trainer.load_step(step, RATE)
        index, gave_up = 0, False
        while index < len(kinds):
            if not trainer.there((kinds[index],)):
                time.sleep(0.0002)
                continue
            partition = draw.randrange(len(trainer.streams))
            if partition != last:
                trainer.streams[partition].wait_stream(trainer.streams[last])
            trainer.launch(partition, index)
            index, last = index + 1, partition
            if not gave_up and give_up(number, index):
                trainer.leave_off(partition).synchronize()
                if trainer.memory is not None:
                    trainer.memory.activations.give_up()
                    trainer.memory.activations.grant(1)
                index, gave_up = 0, True
        results += trainer.results()
    torch.cuda.synchronize()
    return results + trainer.results()


def never(step: int, tasklet: int) -> bool:
    return False


@pytest.mark.parametrize("rate", [Rate(), Rate(2.0 * 2**30)])
@pytest.mark.parametrize("slots", [1, 2, LAYERS])
def test_captured_tasklets_of_a_streamed_base_are_those_of_the_whole_one(
    slots: int, rate: Rate, tmp_path: Path
) -> None:
    model, steps, device = source(), batches(STEPS), torch.device("cuda", 0)
    model.save_pretrained(tmp_path)
    whole = model.cuda()
    start = parameters(whole)
    served = small.Served(whole, padding=0).cuda()
    fused = FusedWeights.of(served, views.shared_model(served, tmp_path))
    plain = CapturedTrainer(fused, Slot(RANK, TOKENS), [torch.cuda.Stream() for _ in range(2)])
    plain.load_job(start, scaling=2.0, weight_decay=0.0, max_grad_norm=1.0)
    torch.cuda.synchronize()
    expected = run(plain, steps, 0, never)
    weights = plain.job_state().optimizer(start)

    arena = open_arena(device, 2 * 2**30)
    memory = SlotMemory(arena, lambda pages: None)
    base = StreamedBase(
        base_folder.read(tmp_path, torch.bfloat16), slots, memory.buffer,
        device=device, mappings=lambda: memory.mappings, rate=rate,
    )  # fmt: skip
    streams = [torch.cuda.Stream() for _ in range(2)]
    trainer = CapturedTrainer(base.fused(), Slot(RANK, TOKENS), streams, memory, base)
    assert trainer.alone_ms().keys() == {"forward", "head", "backward", "optimizer"}
    torch.cuda.synchronize()
    memory.unmap()
    assert arena.statistics().used == 0

    def at_times(step: int, tasklet: int) -> bool:
        return (step, tasklet) in ((1, 3), (2, LAYERS + 4), (3, 1))

    for seed, give_up in ((1, never), (2, never), (3, at_times)):
        base.load()
        assert base.window.source is not None
        fixed = torch.from_numpy(base.window.source.fixed.numpy())  # of a view torch would ask the storage's first byte
        assert fixed.is_pinned()
        trainer.load_job(start, scaling=2.0, weight_decay=0.0, max_grad_norm=1.0)
        memory.map()
        torch.cuda.synchronize()
        assert run(trainer, steps, seed, give_up) == expected
        state = trainer.job_state(away=True).optimizer(start)
        assert all(torch.equal(value, weights[name]) for name, value in state.items())
        trainer.leave_off(0).synchronize()
        base.unload().synchronize()
        memory.unmap()
        assert arena.statistics().used == 0


@pytest.mark.parametrize("slots", [1, 2, LAYERS])
def test_eager_tasklets_of_a_streamed_base_are_those_of_the_whole_one(slots: int, tmp_path: Path) -> None:
    model, device = source(), torch.device("cuda", 0)
    model.save_pretrained(tmp_path)
    spec = small.spec(tmp_path, max_steps=4, accumulation=2, evaluation_fraction=0.2)

    def finish(trainer: Trainer) -> list[float]:
        deadline = time.monotonic() + 60
        while not trainer.done and time.monotonic() < deadline:
            if trainer.upcoming(1):
                trainer.run_next()
        assert trainer.done
        return [metric.loss or metric.eval_loss or 0.0 for metric in trainer.take_metrics()]

    expected = finish(Trainer(model.cuda(), spec, small.rows(), base_name="base"))
    base = StreamedBase(base_folder.read(tmp_path, torch.bfloat16), slots, TorchMemory(device).buffer, device=device)
    base.load()
    trainer = Trainer(base.model, spec, small.rows(), base_name="base", streamed=base)
    # Torch's attention does not sum in one order.
    assert finish(trainer) == pytest.approx(expected, rel=1e-3)
    trainer.close()
