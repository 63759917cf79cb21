"""What a job keeps of its evaluations: the best adapter, those to be sampled, and the word that it stopped early."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from core.link.messages import JobUpdate, StopJob, Stopping
from tests.runtime.test_runtime import Bench, bench  # noqa: F401

OVERFITTING = {
    "max_steps": 40, "evaluation_fraction": 0.5, "evaluate_every": 2, "learning_rate": 5e-2, "patience": 2,
}  # fmt: skip


def tensors(folder: str | Path) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "adapter_model.safetensors")


def updates(bench: Bench, kind: str) -> list[JobUpdate]:  # noqa: F811
    return [m for m in bench.received if isinstance(m, JobUpdate) and m.kind == kind]


def test_the_best_adapter_is_the_one_that_is_saved(bench: Bench) -> None:  # noqa: F811
    bench.start(**OVERFITTING, keep_best=True)
    done = bench.update("succeeded")
    (stopped,) = updates(bench, "stopped_early")
    evaluations = [m for m in updates(bench, "metric") if m.eval_loss is not None]
    best = min(evaluations, key=lambda m: m.eval_loss or 0.0)
    assert evaluations[-1].best_step == best.step and evaluations[-1].best_loss == best.eval_loss
    assert f"at step {best.step}" in (stopped.message or "") and f"of step {best.step}" in (done.message or "")
    kept = {m.step: m.path for m in updates(bench, "evaluated")}
    saved = tensors(done.path or "")
    there = tensors(kept[best.step] or "")
    assert best.step < done.step and all(torch.equal(saved[name], there[name]) for name in there)


def test_a_stop_with_saving_keeps_the_best_one_too(bench: Bench) -> None:  # noqa: F811
    bench.start(**{**OVERFITTING, "patience": 0, "max_steps": 500}, keep_best=True)
    bench.until(lambda m: isinstance(m, JobUpdate) and m.step >= 4)
    bench.send(StopJob(job_id="job", token=1, save=True))
    done = bench.update("succeeded")
    assert "evaluation loss was the lowest" in (done.message or "")


def test_every_evaluation_of_a_sampled_job_leaves_an_adapter(bench: Bench) -> None:  # noqa: F811
    bench.start(max_steps=6, evaluation_fraction=0.25, evaluate_every=2, sample=True)
    done = bench.update("succeeded")
    told = updates(bench, "evaluated")
    assert [m.step for m in told] == [2, 4, 6]
    assert Path(told[-1].path or "").is_dir() and Path(told[-2].path or "").is_dir()
    last, saved = tensors(told[-1].path or ""), tensors(done.path or "")
    assert done.message is None and all(torch.equal(last[name], saved[name]) for name in saved)


def test_an_engine_that_stops_says_so_before_it_lets_go_of_its_job(bench: Bench) -> None:  # noqa: F811
    bench.start(max_steps=500)
    bench.update("metric")
    bench.runtime.close()
    bench.until(lambda m: isinstance(m, JobUpdate) and m.kind == "interrupted", step=lambda: None)
    kinds = [type(m) if not isinstance(m, JobUpdate) else m.kind for m in bench.received]
    assert kinds.index(Stopping) < kinds.index("interrupted")
