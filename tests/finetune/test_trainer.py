"""A job as tasklets: the same losses and weights as a plain loop, whatever happens in between."""

from __future__ import annotations

import gc
import math
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks import plain_loop
from core.errors import Invalid
from core.finetune import lora
from core.finetune.trainer import Metric, NotFinite, Trainer
from core.intake import packing
from core.intake.packing import MicroBatch
from core.link.messages import JobSpec, LoraSpec
from tests.finetune import small


def make(spec: JobSpec, *, dtype: torch.dtype = torch.float32, resume_from: Path | None = None) -> Trainer:
    return Trainer(small.model(dtype=dtype), spec, small.rows(), base_name="small", resume_from=resume_from)


def run(trainer: Trainer, steps: int | None = None) -> list[Metric]:
    metrics: list[Metric] = []
    while not trainer.done and (steps is None or trainer.progress.step < steps):
        trainer.run_next()
        metrics += trainer.take_metrics()
    return metrics


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer._optimizer.masters.items()}


def batches(spec: JobSpec) -> list[list[MicroBatch]]:
    """The job's micro-batches, by optimizer step, made from the packing alone."""
    rows = small.rows()
    packs: list[list[int]] = []
    epoch = 0
    assert spec.max_steps is not None
    while len(packs) < spec.max_steps * spec.accumulation:
        packs += packing.epoch_plan([len(r.ids) for r in rows], spec.micro_batch_tokens, seed=spec.seed, epoch=epoch)
        epoch += 1
    made = [packing.build([rows[i] for i in pack], spec.micro_batch_tokens) for pack in packs]
    return [made[n : n + spec.accumulation] for n in range(0, spec.max_steps * spec.accumulation, spec.accumulation)]


def plain(spec: JobSpec, dtype: torch.dtype) -> plain_loop.PlainRun:
    return plain_loop.train(
        small.model(dtype=dtype),
        batches(spec),
        rank=spec.lora.rank,
        alpha=spec.lora.alpha,
        learning_rate=spec.learning_rate,
        max_grad_norm=spec.max_grad_norm,
        seed=spec.seed,
    )


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 1e-2)])
def test_losses_over_20_steps_are_those_of_a_plain_loop(
    dtype: torch.dtype, tolerance: float, accumulation: int, tmp_path: Path
) -> None:
    spec = small.spec(tmp_path, max_steps=20, accumulation=accumulation)
    losses = [metric.loss for metric in run(make(spec, dtype=dtype))]
    expected = plain(spec, dtype).losses
    assert losses == pytest.approx(expected, rel=tolerance)
    assert losses[-1] < 0.8 * losses[0]


def test_weights_move_as_in_a_plain_loop(tmp_path: Path) -> None:
    spec = small.spec(tmp_path, max_steps=20)
    trainer = make(spec)
    run(trainer)
    expected = plain(spec, torch.float32)
    difference = moved = 0.0
    for name, weight in weights(trainer).items():
        difference += float((weight - expected.final[name]).square().sum())
        moved += float((expected.final[name] - expected.initial[name]).square().sum())
    assert moved > 0
    assert math.sqrt(difference / moved) < 0.01


def test_a_job_resumed_from_a_checkpoint_ends_as_one_left_alone(tmp_path: Path) -> None:
    spec = small.spec(tmp_path, accumulation=2, lora=LoraSpec(rank=4, alpha=8.0, dropout=0.2))
    alone = make(spec)
    undisturbed = run(alone)
    first = make(spec)
    run(first, steps=3)
    for _ in range(4):  # part of the fourth step, which is lost
        first.run_next()
    path = first.snapshot().write(tmp_path)
    resumed = make(spec, resume_from=path)
    assert [m.loss for m in run(resumed)] == [m.loss for m in undisturbed[3:]]
    expected = weights(alone)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights(resumed).items())


def test_dropout_draws_the_same_numbers_when_others_draw_in_between(tmp_path: Path) -> None:
    spec = small.spec(tmp_path, max_steps=3, lora=LoraSpec(rank=4, alpha=8.0, dropout=0.5))
    alone = [m.loss for m in run(make(spec))]
    trainer, losses = make(spec), []
    while not trainer.done:
        torch.rand(7)
        trainer.run_next()
        losses += [m.loss for m in trainer.take_metrics()]
    assert losses == alone
    assert alone != [m.loss for m in run(make(small.spec(tmp_path, max_steps=3)))]


def test_training_leaves_the_generator_that_sampling_uses_alone(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    run(make(small.spec(tmp_path, lora=LoraSpec(rank=4, dropout=0.5))), steps=2)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_step_is_one_tasklet_per_layer_and_direction(tmp_path: Path) -> None:
    trainer = make(small.spec(tmp_path))
    kinds = trainer.upcoming(100)
    assert [k for k in kinds if k != "head"] == ["forward", "forward", "backward", "backward", "optimizer"]
    assert "head" in kinds


def test_evaluation_is_on_rows_that_are_not_trained(tmp_path: Path) -> None:
    spec = small.spec(tmp_path, max_steps=4, evaluation_fraction=0.25, evaluate_every=2)
    trainer = make(spec)
    trained = {i for pack in trainer._packs for i in pack}
    held_out = {i for pack in trainer._eval_packs for i in pack}
    assert held_out and not trained & held_out
    assert [m.step for m in run(trainer) if m.eval_loss is not None] == [2, 4]


def test_evaluation_does_not_change_the_training(tmp_path: Path) -> None:
    def losses(every: int) -> list[float | None]:
        spec = small.spec(tmp_path, evaluation_fraction=0.25, evaluate_every=every)
        return [m.loss for m in run(make(spec)) if m.loss is not None]

    assert losses(1) == losses(0)


def test_epochs_visit_every_row(tmp_path: Path) -> None:
    trainer = make(small.spec(tmp_path, max_steps=None, epochs=2.0))
    visited = [i for pack in trainer._packs for i in pack]
    assert sorted(visited) == sorted(list(range(24)) * 2)
    run(trainer)
    assert trainer.epoch == pytest.approx(2.0, rel=0.2)


def test_closing_gives_the_shared_model_back(tmp_path: Path) -> None:
    base = small.model()
    before = {name: p.clone() for name, p in base.named_parameters()}
    trainer = Trainer(base, small.spec(tmp_path), small.rows(), base_name="small")
    run(trainer, steps=2)
    trainer.close()
    after = dict(base.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not any(p.requires_grad for p in after.values())


def test_closing_frees_what_the_job_held(tmp_path: Path) -> None:
    base = small.model()
    trainer = Trainer(base, small.spec(tmp_path), small.rows(), base_name="small")
    run(trainer, steps=2)
    held = [*lora.trainable(trainer._model).values(), *trainer._optimizer.masters.values()]
    refs = [weakref.ref(tensor) for tensor in held]
    del held
    trainer.close()
    del trainer
    gc.collect()
    assert refs and not [ref for ref in refs if ref() is not None]


def test_the_saved_adapter_loads_in_plain_peft(tmp_path: Path) -> None:
    from peft import PeftModel

    base = small.model()
    trainer = Trainer(base, small.spec(tmp_path), small.rows(), base_name="small")
    run(trainer)
    ids = torch.arange(1, 9)[None]
    expected = base(ids).logits.detach()
    trainer.snapshot().save_adapter(tmp_path / "adapter")
    trainer.close()
    assert not torch.allclose(base(ids).logits, expected)
    loaded = PeftModel.from_pretrained(small.model(), str(tmp_path / "adapter"))
    torch.testing.assert_close(loaded(ids).logits, expected)
    assert "small" in (tmp_path / "adapter/adapter_config.json").read_text()


def test_a_job_starts_from_an_adapter(tmp_path: Path) -> None:
    first = make(small.spec(tmp_path))
    run(first)
    first.snapshot().save_adapter(tmp_path / "first")
    second = make(small.spec(tmp_path, initial_adapter=str(tmp_path / "first")))
    saved = load_file(tmp_path / "first/adapter_model.safetensors")
    mine = lora.trainable(second._model)
    assert all(torch.equal(mine[name.replace(".weight", ".default.weight")], saved[name]) for name in saved)


def test_an_initial_adapter_of_another_rank_is_refused_and_leaves_the_model_clean(tmp_path: Path) -> None:
    first = make(small.spec(tmp_path))
    first.snapshot().save_adapter(tmp_path / "first")
    base = small.model()
    spec = small.spec(tmp_path, initial_adapter=str(tmp_path / "first"), lora=LoraSpec(rank=2))
    with pytest.raises(Invalid, match="has rank 4"):
        Trainer(base, spec, small.rows(), base_name="small")
    assert not any("lora" in name for name, _ in base.named_parameters())


def test_a_checkpoint_of_other_data_is_refused(tmp_path: Path) -> None:
    trainer = make(small.spec(tmp_path))
    path = trainer.snapshot().write(tmp_path)
    with pytest.raises(Invalid, match="other data or hyperparameters"):
        Trainer(small.model(), small.spec(tmp_path), small.rows(seed=1), base_name="small", resume_from=path)


def test_a_row_longer_than_a_micro_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="micro_batch_tokens"):
        make(small.spec(tmp_path, micro_batch_tokens=8))


def test_a_loss_that_is_no_number_ends_the_job(tmp_path: Path) -> None:
    base = small.model()
    with torch.no_grad():
        base.model.norm.weight.fill_(float("nan"))
    trainer = Trainer(base, small.spec(tmp_path), small.rows(), base_name="small")
    with pytest.raises(NotFinite, match="step 1"):
        run(trainer)
