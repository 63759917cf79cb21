"""A job on captured tasklets lives as one of the eager trainer does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from core.errors import Invalid
from core.finetune import views
from core.finetune.captured import CapturedTrainer, Slot
from core.finetune.captured_job import CapturedJob
from core.finetune.fused import FusedWeights
from core.finetune.trainer import Metric, NotFinite, Trainer
from core.link.messages import JobSpec, LoraSpec
from core.memory.arena import open_arena, view
from core.memory.share import JobShare
from core.memory.slot import SlotMemory
from tests.finetune import small

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
TOKENS = 64


@pytest.fixture(scope="module")
def slot(tmp_path_factory: pytest.TempPathFactory) -> tuple[CapturedTrainer, PreTrainedModel]:
    """A slot with two partitions, and the shared model, over one set of weights."""
    source = small.model(dtype=torch.bfloat16, hidden=128).cuda()
    served = small.Served(source).cuda()
    model = views.shared_model(served, small.folder(source, tmp_path_factory.mktemp("model")))
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    return CapturedTrainer(FusedWeights.of(served, model), Slot(8, TOKENS), streams), model


def spec_of(folder: Path, **changes: object) -> JobSpec:
    fields = {"micro_batch_tokens": TOKENS, "sequence_length": TOKENS, "learning_rate": 3e-3, "max_steps": 8}
    return small.spec(folder, **(fields | changes))


def run(job: CapturedJob, steps: int | None = None) -> list[Metric]:
    metrics, last, number = [], 0, 0
    while not job.done and (steps is None or job.progress.step < steps):
        partition = number // 3 % 2  # in the middle of things
        if partition != last:
            job._compute.streams[partition].wait_stream(job._compute.streams[last])
        if job.launch(partition) is None:
            torch.cuda.synchronize()
        last, number = partition, number + 1
        metrics += job.take_metrics()
    torch.cuda.synchronize()
    return metrics + job.take_metrics()


def make(slot: tuple[CapturedTrainer, PreTrainedModel], spec: JobSpec, resume_from: Path | None = None) -> CapturedJob:
    return CapturedJob(*slot, spec, small.rows(), base_name="small", resume_from=resume_from)


def test_metrics_are_those_of_the_eager_trainer(slot: tuple[CapturedTrainer, PreTrainedModel], tmp_path: Path) -> None:
    spec = spec_of(tmp_path, accumulation=2, evaluation_fraction=0.25, evaluate_every=3, warmup_ratio=0.2)
    job = make(slot, spec)
    mine = run(job)
    job.close()
    eager = Trainer(slot[1], spec, small.rows(), base_name="small")
    theirs: list[Metric] = []
    while not eager.done:
        eager.run_next()
        theirs += eager.take_metrics()
    eager.close()
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert (a.step, a.epoch, a.tokens, a.learning_rate) == (b.step, b.epoch, b.tokens, b.learning_rate)
        for name in ("loss", "eval_loss", "grad_norm"):
            assert getattr(a, name) == pytest.approx(getattr(b, name), rel=2e-2), name


def test_a_job_resumed_from_a_checkpoint_ends_as_one_left_alone(
    slot: tuple[CapturedTrainer, PreTrainedModel], tmp_path: Path
) -> None:
    spec = spec_of(tmp_path, accumulation=2)
    job = make(slot, spec)
    undisturbed = run(job)
    job.snapshot().save_adapter(tmp_path / "alone")
    job.close()
    job = make(slot, spec)
    run(job, steps=3)
    for _ in range(4):  # part of the fourth step, which is lost
        job.launch(0)
    path = job.snapshot().write(tmp_path)
    job.close()
    other = make(slot, spec_of(tmp_path, lora=LoraSpec(rank=2, target_modules=("v_proj",))))
    run(other, steps=2)
    other.close()
    resumed = make(slot, spec, path)
    assert [m.loss for m in run(resumed)] == [m.loss for m in undisturbed[3:]]
    resumed.snapshot().save_adapter(tmp_path / "resumed")
    resumed.close()
    alone, again = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("alone", "resumed"))
    assert alone.keys() == again.keys() and all(torch.equal(alone[name], again[name]) for name in alone)


def test_a_checkpoint_goes_from_captured_to_eager(
    slot: tuple[CapturedTrainer, PreTrainedModel], tmp_path: Path
) -> None:
    spec = spec_of(tmp_path)
    job = make(slot, spec)
    metrics = run(job)
    job.close()
    job = make(slot, spec)
    run(job, steps=4)
    path = job.snapshot().write(tmp_path)
    job.close()
    eager = Trainer(slot[1], spec, small.rows(), base_name="small", resume_from=path)
    losses: list[float | None] = []
    while not eager.done:
        eager.run_next()
        losses += [m.loss for m in eager.take_metrics()]
    eager.close()
    assert losses == pytest.approx([m.loss for m in metrics[4:]], rel=2e-2)


def test_a_loss_that_is_no_number_ends_the_job(slot: tuple[CapturedTrainer, PreTrainedModel], tmp_path: Path) -> None:
    job = make(slot, spec_of(tmp_path))
    norm = slot[1].model.norm.weight
    before = norm.clone()
    try:
        norm.fill_(float("nan"))
        with pytest.raises(NotFinite, match="step 1"):
            run(job)
    finally:
        norm.copy_(before)
        job.close()


def test_a_job_on_the_arena_ends_as_one_in_torchs_memory_whatever_is_taken_meanwhile(
    slot: tuple[CapturedTrainer, PreTrainedModel], tmp_path: Path
) -> None:
    spec = spec_of(tmp_path, accumulation=2, evaluation_fraction=0.25, evaluate_every=3)
    job = make(slot, spec)
    alone = run(job)
    job.close()

    arena = open_arena(torch.device("cuda", 0), 256 * 2**20, 2 * 2**20)
    memory = SlotMemory(arena, lambda pages: None)
    compute = CapturedTrainer(slot[0]._fused.weights, slot[0].slot, slot[0].streams, memory)
    torch.cuda.synchronize()
    memory.unmap()
    assert arena.statistics().used == 0
    share = JobShare(memory.state, memory.activations)
    job = CapturedJob(compute, slot[1], spec, small.rows(), base_name="small", new_share=lambda: share)
    metrics: list[Metric] = []
    launched, last = 0, 0
    while not job.done:
        if share.wanted:
            share.grant(share.wanted)
            share.settle()
        partition = launched // 3 % 2
        if partition != last:
            compute.streams[partition].wait_stream(compute.streams[last])
        if job.launch(partition) is None:
            torch.cuda.synchronize()
        launched, last = launched + 1, partition
        metrics += job.take_metrics()
        if launched % 11 == 0:
            over = job.start_again()
            share.give_up_activations(over)
            if launched % 22 == 0:
                share.swap_out(over)
            share.settle()
            other = arena.reserve("kv", 100)
            other.map(0, 100)
            view(arena, other, (100 * arena.page_bytes,), torch.uint8).fill_(255)
            torch.cuda.synchronize()
            del other
    assert metrics == alone
    job.close()
    share.settle()
    assert arena.statistics().used == 0


@pytest.mark.parametrize(
    "changes", [{"lora": LoraSpec(rank=16)}, {"lora": LoraSpec(dropout=0.1)}, {"micro_batch_tokens": 32}]
)
def test_a_job_that_the_slot_does_not_hold_is_refused(
    changes: dict[str, object], slot: tuple[CapturedTrainer, PreTrainedModel], tmp_path: Path
) -> None:
    with pytest.raises(Invalid, match="start the engine with such a slot"):
        make(slot, spec_of(tmp_path, **changes))
