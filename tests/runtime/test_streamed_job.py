"""A job on a base of its own in the broker's hands: memory comes and goes, and however it ends all of it is back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.finetune import base_folder
from core.finetune.metered import MeteredTrainer
from core.finetune.streamed import StreamedBase
from core.finetune.trainer import Trainer
from core.link.messages import JobUpdate
from core.runtime.job import JobRun
from tests.finetune import small
from tests.finetune.cpu_slot import CpuSlot, on_a_cpu
from tests.runtime.test_memory import ROW, ROWS, Bench, run_among_bursts, until

LAYERS, SLOTS = 5, 2


@pytest.fixture
def bench() -> Bench:
    return Bench(rows=12 * ROWS)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    small.model(layers=LAYERS).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def streamed(bench: Bench, path: Path, output: Path, slots: int = SLOTS) -> tuple[JobRun, list[JobUpdate]]:
    """A small job on the folder's base, as the engine makes it, that has begun to run."""
    told: list[JobUpdate] = []
    spec = small.spec(output, base_model="base")

    def prepare() -> Trainer:
        frozen = bench.broker.frozen("1")
        whole = StreamedBase(
            base_folder.read(path, torch.float32), slots, frozen.take, device=torch.device("cpu"),
            mappings=lambda: frozen.mappings,
        )  # fmt: skip
        whole.load()

        def new_share(state: object) -> object:
            bench.share, bench.activations = bench.broker.share("1", state, whole.model.parameters(), frozen)  # type: ignore[arg-type]
            return bench.share, bench.activations

        return MeteredTrainer(
            whole.model, spec, small.rows(), base_name="base", streamed=whole, new_share=new_share  # type: ignore[arg-type]
        )  # fmt: skip

    job = JobRun("engine", spec, 1, prepare, told.append)
    until(job, lambda: job.view() is not None or job.ended)
    return job, told


def losses(told: list[JobUpdate]) -> list[float]:
    return [update.loss for update in told if update.loss is not None]


def test_a_job_whose_window_is_taken_and_given_back_has_the_losses_of_one_left_alone(
    bench: Bench, base: Path, tmp_path: Path
) -> None:
    alone = Trainer(small.model(layers=LAYERS), small.spec(tmp_path), small.rows(), base_name="base")
    while not alone.done:
        alone.run_next()
    job, told = streamed(bench, base, tmp_path)
    assert "5 layers go through a window of 2" in (told[0].message or "")
    run_among_bursts(bench, job, 40, calm=20)
    assert losses(told) == [metric.loss for metric in alone.take_metrics()]
    assert len([code for code, _ in bench.broker.news() if code == "memory_reclaimed"]) > 2


@pytest.mark.parametrize("order", ["pause", "cancel", "interrupt", "fail"])
def test_however_a_job_ends_the_arena_is_as_before_it(order: str, bench: Bench, base: Path, tmp_path: Path) -> None:
    bench.look()
    before = bench.kv.arena.statistics().used
    job, told = streamed(bench, base, tmp_path)
    while len(losses(told)) < 2:
        bench.look(4.0)
        if bench.broker.waiting is None:
            job.run_next()
        job.poll()
    job.run_next()  # in the middle of a step
    assert bench.share is not None and bench.share.held > 0
    if order == "fail":
        trainer = job._trainer
        assert isinstance(trainer, MeteredTrainer) and trainer._streamed is not None
        trainer._streamed.window.source = None
        while not job.ended:
            job.run_next()
        assert told[-1].kind == "failed"
    else:
        {"pause": job.pause, "cancel": lambda: job.stop(save=False), "interrupt": job.interrupt}[order]()
    until(job, lambda: job.ended)
    share, bench.share = bench.share, None
    share.settle()
    assert share.held == 0
    bench.look(4.0)
    bench.look(4.0)
    assert bench.kv.arena.statistics().used == before and bench.kv.size == bench.kv.most


@pytest.mark.usefixtures(on_a_cpu.__name__)
def test_a_copy_that_cannot_be_queued_ends_the_job_and_nothing_else(bench: Bench, tmp_path: Path) -> None:
    slot = CpuSlot(small.model(layers=LAYERS), tmp_path / "base", bench.kv.arena, window=SLOTS)
    assert slot.memory is not None and slot.streamed is not None
    bench.kv.resize(ROWS * ROW - 1)
    told: list[JobUpdate] = []
    job = JobRun("engine", small.spec(tmp_path), 1, lambda: slot.job(small.spec(tmp_path)), told.append)
    until(job, lambda: job.view() is not None)
    slot.grant()
    slot.streamed.window.source = None
    assert job.view() is None and job.ended
    assert told[-1].kind == "failed"
    assert slot.share is not None
    slot.share.settle()
    assert slot.share.held == 0


def test_a_window_that_leaves_nothing_for_the_job_ends_it_with_what_to_do(base: Path, tmp_path: Path) -> None:
    bench = Bench(rows=ROWS)
    job, told = streamed(bench, base, tmp_path, slots=LAYERS)
    assert (told[-1].kind, told[-1].code) == ("failed", "out_of_memory") and job.ended
    assert "engine.max_total_tokens" in (told[-1].message or "")
