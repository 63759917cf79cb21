"""A job within its share of the arena: it waits, asks and begins again, and comes to the same adapter."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from core.finetune.metered import MeteredTrainer
from core.finetune.trainer import Trainer
from core.link.messages import JobSpec, LoraSpec
from core.memory import _arena
from core.memory.arena import Arena, OutOfMemory
from core.memory.share import JobShare
from tests.finetune import small

PAGE = 4096


def make(spec: JobSpec, arena: Arena, cap: int) -> MeteredTrainer:
    model = small.model()
    return MeteredTrainer(
        model,
        spec,
        small.rows(),
        base_name="small",
        make_share=lambda size: JobShare(arena, "job 1", size, cap, shared=model.parameters()),
    )


def finish(trainer: Trainer, share: JobShare | None = None, taken_every: int = 0) -> dict[str, torch.Tensor]:
    """Run to the end; whatever is wanted is granted, and every so often the activations are taken away."""
    ran = 0
    while not trainer.done:
        if share is not None and share.wanted:
            share.grant(share.wanted)
        trainer.run_next()
        ran += 1
        if share is not None and taken_every and ran % taken_every == 0:
            trainer.start_again()
            gc.collect()
            share.give_up_activations()
    return trainer.snapshot().optimizer


def test_memory_that_comes_late_and_is_taken_back_changes_nothing_in_the_adapter(tmp_path: Path) -> None:
    spec = small.spec(tmp_path, accumulation=2, lora=LoraSpec(rank=4, alpha=8.0, dropout=0.1), evaluate_every=3)
    alone = finish(Trainer(small.model(), spec, small.rows(), base_name="small"))
    arena = _arena.memfd_arena(PAGE, 1000)
    trainer = make(spec, arena, cap=900)
    assert trainer.share.held == 0 and trainer.share.wanted == trainer.share.state > 0
    metered = finish(trainer, trainer.share, taken_every=37)
    assert trainer.share.high_water_bytes > PAGE
    assert metered.keys() == alone.keys()
    assert all(torch.equal(metered[name], alone[name]) for name in alone)
    trainer.close()
    assert arena.statistics().used == 0


def test_a_micro_batch_that_can_never_fit_ends_the_job_and_nothing_else(tmp_path: Path) -> None:
    arena = _arena.memfd_arena(PAGE, 1000)
    trainer = make(small.spec(tmp_path), arena, cap=30)
    with pytest.raises(OutOfMemory, match=r"saves \d+ bytes for its backward"):
        finish(trainer, trainer.share)
    trainer.close()
    gc.collect()
    assert arena.statistics().used == 0


def test_a_job_that_gets_no_share_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = small.model()

    def refuse(size: int) -> JobShare:
        raise OutOfMemory(f"{size} bytes are too many")

    with pytest.raises(OutOfMemory, match="are too many"):
        MeteredTrainer(model, small.spec(tmp_path), small.rows(), base_name="small", make_share=refuse)
    assert not [name for name, _ in model.named_parameters() if "lora" in name]
