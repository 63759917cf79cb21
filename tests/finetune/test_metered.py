"""A job within its share of the arena: it waits, asks and begins again, and comes to the same adapter."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from core.finetune.metered import MeteredTrainer
from core.finetune.trainer import Snapshot, Trainer
from core.link.messages import JobSpec, LoraSpec
from core.memory import _arena
from core.memory.arena import Arena, OutOfMemory
from core.memory.metered import MeteredActivations
from core.memory.share import JobShare
from core.memory.swap import Swappable
from tests.finetune import small

PAGE = 4096


def make(spec: JobSpec, arena: Arena, ceiling: int, dtype: torch.dtype = torch.float32) -> MeteredTrainer:
    model = small.model(dtype=dtype)

    def new_share(state: Sequence[torch.Tensor]) -> tuple[JobShare, MeteredActivations]:
        kept = Swappable(arena, "job 1", [(tuple(one.shape), one.dtype) for one in state], window=4 * PAGE)
        kept.put(state)
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        activations = MeteredActivations(arena, "job 1", ceiling, shared=[*frozen, *kept.tensors])
        return JobShare(kept, activations), activations

    return MeteredTrainer(model, spec, small.rows(), base_name="small", new_share=new_share)


def finish(trainer: Trainer, share: JobShare | None = None, taken_every: int = 0) -> Snapshot:
    """Run to the end; whatever is wanted is granted, and every so often the activations are taken away, every other
    time the state too."""
    ran = 0
    while not trainer.done:
        if share is not None and share.wanted:
            share.grant(share.wanted)
            share.settle()
        trainer.run_next()
        ran += 1
        if share is not None and taken_every and ran % taken_every == 0:
            trainer.start_again()
            gc.collect()
            share.give_up_activations()
            if ran // taken_every % 2:
                share.swap_out()
            share.settle()
            assert share.held == (0 if ran // taken_every % 2 else share.state.pages)
    return trainer.snapshot()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_that_comes_late_and_is_taken_back_changes_nothing_in_the_adapter(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    spec = small.spec(tmp_path, accumulation=2, lora=LoraSpec(rank=4, alpha=8.0, dropout=0.1), evaluate_every=3)
    plain = Trainer(small.model(dtype=dtype), spec, small.rows(), base_name="small")
    alone = finish(plain)
    arena = _arena.memfd_arena(PAGE, 1000)
    trainer = make(spec, arena, 800, dtype)
    share = trainer.share
    assert share.held == 0 and share.wanted == share.state.pages > 0
    metered = finish(trainer, share, taken_every=37)
    assert metered.optimizer.keys() == alone.optimizer.keys()
    assert all(torch.equal(metered.optimizer[name], alone.optimizer[name]) for name in alone.optimizer)
    assert trainer.take_metrics() == plain.take_metrics()
    for name, snapshot in (("metered", metered), ("alone", alone)):
        snapshot.save_adapter(tmp_path / name)
    files = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("metered", "alone")]
    assert all(torch.equal(value, files[1][name]) and value.dtype == dtype for name, value in files[0].items())
    trainer.close()
    share.settle()
    assert arena.statistics().used == 0


def test_a_micro_batch_that_can_never_fit_ends_the_job_and_nothing_else(tmp_path: Path) -> None:
    arena = _arena.memfd_arena(PAGE, 1000)
    trainer = make(small.spec(tmp_path), arena, ceiling=10)
    with pytest.raises(OutOfMemory, match=r"saves \d+ bytes for its backward"):
        finish(trainer, trainer.share)
    trainer.close()
    trainer.share.settle()
    assert arena.statistics().used == 0


def test_a_job_that_is_away_can_still_be_kept(tmp_path: Path) -> None:
    arena = _arena.memfd_arena(PAGE, 1000)
    trainer = make(small.spec(tmp_path), arena, ceiling=900)
    share = trainer.share
    while trainer.progress.step < 3:
        share.grant(share.wanted)
        share.settle()
        trainer.run_next()
    inside = trainer.snapshot()
    trainer.start_again()
    share.give_up_activations()
    share.swap_out()
    share.settle()
    trainer.start_again()  # touches nothing
    away = trainer.snapshot()
    assert all(torch.equal(value, inside.optimizer[name]) for name, value in away.optimizer.items())
    path = away.write(tmp_path)
    trainer.close()
    resumed = Trainer(small.model(), small.spec(tmp_path), small.rows(), base_name="small", resume_from=path)
    assert resumed.progress.step == 3


def test_a_job_that_gets_no_share_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = small.model()

    def refuse(state: Sequence[torch.Tensor]) -> tuple[JobShare, MeteredActivations]:
        raise OutOfMemory(f"{len(state)} tensors are too many")

    with pytest.raises(OutOfMemory, match="are too many"):
        MeteredTrainer(model, small.spec(tmp_path), small.rows(), base_name="small", new_share=refuse)
    assert not [name for name, _ in model.named_parameters() if "lora" in name]
