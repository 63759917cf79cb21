"""A captured program's buffers on the arena, their arithmetic run eagerly on a CPU: losses are those of a plain loop
while state leaves for host memory and comes back, activations are dropped, and other jobs' pages lie in between."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from core.finetune.captured_job import CapturedJob
from core.finetune.fused import FusedStep, Work, pack_inputs
from core.finetune.trainer import Trainer
from core.link.messages import JobSpec
from core.memory import _arena
from core.memory.arena import Arena
from core.memory.rate import Rate
from core.memory.share import JobShare
from core.memory.slot import SlotMemory
from tests.finetune import small
from tests.finetune.cpu_slot import CpuSlot, no_room, on_a_cpu, weights

pytestmark = pytest.mark.usefixtures(on_a_cpu.__name__)

PAGE = 4096
TOKENS = 32


@pytest.fixture
def arena() -> Arena:
    return _arena.memfd_arena(PAGE, 4000)


def test_buffers_are_zero_whenever_they_are_mapped_and_hold_nothing_else(arena: Arena, tmp_path: Path) -> None:
    memory = SlotMemory(arena, no_room)
    step = FusedStep(weights(small.model("qwen3"), tmp_path), rank=4, micro_batch_tokens=TOKENS, place=memory)
    assert arena.statistics().used == 0 and not memory.present
    memory.map()
    assert memory.present and arena.statistics().used == memory.pages == memory.bytes // PAGE
    own = [step.lora.masters, step.lora.gradient, step.lora.working, step.buffers.logits, step.buffers.gradient]
    for tensor in own:
        assert not tensor.any()
        tensor.fill_(3.0)
    memory.unmap()
    taken = arena.reserve("kv", memory.pages)
    taken.map(0, memory.pages)
    del taken
    memory.map()
    assert not any(tensor.any() for tensor in own)


def losses_of(job: CapturedJob, disturb: object = None) -> list[float | None]:
    losses: list[float | None] = []
    launched = 0
    while not job.done:
        if job.launch(0) is not None:
            launched += 1
            if callable(disturb):
                disturb(launched, job)
        losses += [metric.loss or metric.eval_loss for metric in job.take_metrics()]
    return losses


def test_losses_are_those_of_the_eager_trainer_whatever_is_taken_meanwhile(arena: Arena, tmp_path: Path) -> None:
    spec = small.spec(tmp_path, accumulation=2, evaluation_fraction=0.25, evaluate_every=3, weight_decay=0.01)
    eager = Trainer(small.model(), spec, small.rows(), base_name="small")
    expected = []
    while not eager.done:
        eager.run_next()
        expected += [metric.loss or metric.eval_loss for metric in eager.take_metrics()]

    slot = CpuSlot(small.model(), tmp_path / "plain", None)
    alone = losses_of(slot.job(spec))
    assert alone == pytest.approx(expected, rel=1e-4)

    slot = CpuSlot(small.model(), tmp_path / "arena", arena)
    job = slot.job(spec)
    share = slot.share
    assert share is not None and not share.ready and job.launch(0) is None, "nothing is granted yet"
    moves = []

    def take(launched: int, job: CapturedJob) -> None:
        if launched % 17 == 0:
            over = job.start_again()
            share.give_up_activations(over)
            if launched % 34 == 0:
                share.swap_out(over)
            assert job.launch(0) is None, "its memory is on its way"
            share.settle()
            moves.append(arena.statistics().used)
            claim = arena.claim("kv", 4000 - arena.statistics().used)  # whoever had the pages
            del claim

    def run(launched: int, job: CapturedJob) -> None:
        take(launched, job)
        grant()

    def grant() -> None:
        if share.wanted:
            share.grant(share.wanted)
            share.settle()

    grant()
    assert losses_of(job, run) == alone
    assert 0 in moves and share.state.pages in moves
    job.close()
    share.settle()
    assert arena.statistics().used == 0


def after_three_steps(slot: CpuSlot, spec: JobSpec) -> CapturedJob:
    job = slot.job(spec)
    slot.grant()
    while job.progress.step < 3:
        job.launch(0)
    job.take_metrics()
    return job


def send_away(slot: CpuSlot, job: CapturedJob) -> None:
    """Activations are dropped, and the state goes to host memory."""
    share = slot.share
    assert share is not None
    share.give_up_activations(job.start_again())
    share.swap_out()
    share.settle()


def test_nothing_is_launched_before_a_snapshot_of_what_was_away_is_read(arena: Arena, tmp_path: Path) -> None:
    slot = CpuSlot(small.model(), tmp_path, arena)
    job = after_three_steps(slot, small.spec(tmp_path))
    then = job.snapshot()._state.adapter(job._parameters)
    send_away(slot, job)
    snapshot = job.snapshot()
    slot.grant()
    assert job.launch(0) is None and job.upcoming(1) == ()
    read = snapshot._state.adapter(job._parameters)
    while job.progress.step < 4:
        assert job.upcoming(1) and job.launch(0) is not None
    assert all(torch.equal(read[name], then[name]) for name in then)
    assert all(torch.equal(again, then[name]) for name, again in snapshot._state.adapter(job._parameters).items())
    job.close()


def test_a_job_whose_first_step_cannot_be_made_leaves_the_slot(
    arena: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = CpuSlot(small.model(), tmp_path, arena)
    modules = {type(module) for module in slot._model.modules()}
    with monkeypatch.context() as refused:
        refused.setattr(slot, "program", lambda *_: (_ for _ in ()).throw(MemoryError("no page-locked memory is left")))
        with pytest.raises(MemoryError):
            slot.job(small.spec(tmp_path))
    assert {type(module) for module in slot._model.modules()} == modules
    assert slot.share is not None and slot.share.closed
    job = slot.job(small.spec(tmp_path))
    slot.grant()
    assert losses_of(job) == losses_of(CpuSlot(small.model(), tmp_path / "alone", None).job(small.spec(tmp_path)))
    job.close()


def test_a_job_that_is_away_is_kept_and_the_next_one_gets_the_slot(arena: Arena, tmp_path: Path) -> None:
    spec = small.spec(tmp_path)
    slot = CpuSlot(small.model(), tmp_path, arena)
    job = after_three_steps(slot, spec)
    inside = job.snapshot()._state.optimizer(job._parameters)
    send_away(slot, job)
    snapshot = job.snapshot()
    path = snapshot.write(tmp_path)
    away = snapshot._state.optimizer(job._parameters)
    assert away.keys() == inside.keys() and all(torch.equal(away[name], inside[name]) for name in away)
    job.close()
    other = slot.job(small.spec(tmp_path, seed=3))
    slot.grant()
    losses_of(other)
    other.close()

    resumed = slot.job(spec, resume_from=path)
    slot.grant()
    alone = losses_of(CpuSlot(small.model(), tmp_path / "alone", None).job(spec))
    assert losses_of(resumed) == alone[3:]
    resumed.close()
    assert isinstance(slot.share, JobShare)
    slot.share.settle()
    assert arena.statistics().used == 0


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("window", [1, 2, 5])
def test_a_streamed_base_has_the_losses_of_the_whole_one_whatever_is_taken_meanwhile(
    window: int, recompute: bool, arena: Arena, tmp_path: Path
) -> None:
    """To the last bit, since the same work is done on the same weights."""
    spec = small.spec(tmp_path, max_steps=4, accumulation=2, evaluation_fraction=0.25, evaluate_every=2)

    def source() -> PreTrainedModel:
        return small.model("qwen3", layers=5, tied=False)

    alone = losses_of(CpuSlot(source(), tmp_path / "plain", None, recompute=recompute).job(spec))
    slot = CpuSlot(source(), tmp_path / "base", arena, window, recompute)
    job = slot.job(spec)
    share = slot.share
    assert share is not None

    def take(launched: int, job: CapturedJob) -> None:
        if launched % 41 == 0:
            share.give_up_activations(job.start_again())
            if launched % 82 == 0:
                share.swap_out()
            share.settle()
            claim = arena.claim("kv", 4000 - arena.statistics().used)  # whoever had the pages
            del claim
            slot.grant()

    slot.grant()
    assert losses_of(job, take) == alone
    job.close()
    share.settle()
    assert slot.streamed is not None and slot.streamed.window.source is None
    assert arena.statistics().used == 0

    again = slot.job(spec)
    slot.grant()
    assert losses_of(again) == alone, "the next job in the slot"
    again.close()


def test_a_streamed_tasklet_is_not_launched_before_its_layer_is_there(arena: Arena, tmp_path: Path) -> None:
    slot = CpuSlot(small.model(layers=5), tmp_path / "base", arena, window=2)
    job = slot.job(small.spec(tmp_path))
    assert job.launch(0) is None, "nothing is granted yet"
    slot.grant()
    assert slot.streamed is not None
    window = slot.streamed.window
    # A link that lets nothing through.
    window._rate, window._due = Rate(1.0), float("inf")
    assert job.upcoming(64) == () and job.launch(0) is None
    window._rate, window._due = Rate(), 0.0
    assert job.upcoming(64) == ("forward", "forward"), "of a window of two"
    assert job.launch(0) == "forward"
    job.close()


def test_fused_work_on_the_arena_is_the_work_on_torchs_memory(arena: Arena, tmp_path: Path) -> None:
    """To the last bit, since only addresses differ."""
    (batch,) = CpuSlot.batches(1)
    results = []
    for place in (None, SlotMemory(arena, no_room)):
        step = FusedStep(
            weights(small.model("qwen2"), tmp_path), rank=4, micro_batch_tokens=TOKENS, recompute=True, place=place
        )
        if place is not None:
            place.map()
        torch.manual_seed(0)
        step.lora.masters.normal_(std=0.1)
        step.buffers.scalars.copy_(torch.tensor([1e-2, 0.0, 1.0, 2.0, 1.0 / batch.trained]))
        step.publish()
        step.buffers.inputs.copy_(pack_inputs(batch, step.buffers.inputs.shape[1]))
        for work in [*step.micro_batch(batch.trained), Work("optimizer")]:
            step.run(work)
        results.append((step.buffers.report.clone(), step.lora.masters.clone()))
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))
