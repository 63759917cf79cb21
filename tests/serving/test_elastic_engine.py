"""One memory for two jobs in the real engine: the KV cache gives pages to a job and takes them back under load."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from core.link.messages import EngineNotice, MemoryView, PauseJob, Telemetry
from tests.serving.conftest import Engine, generate
from tests.serving.test_engine import spec

pytestmark = pytest.mark.engine

PROMPTS = [[1000 + 37 * n + 11 * k for k in range(24)] for n in range(4)]
LONG = [[2000 + 501 * n + (7 * k) % 400 for k in range(560)] for n in range(4)]


def memory(engine: Engine, done: Callable[[MemoryView], bool], seconds: float = 120.0) -> MemoryView:
    """The first report of the arena that is so."""
    found = engine.until(lambda m: isinstance(m, Telemetry) and m.memory is not None and done(m.memory), seconds)
    assert isinstance(found, Telemetry) and found.memory is not None
    return found.memory


def of_jobs(view: MemoryView) -> int:
    return sum(owner.bytes for owner in view.owners if owner.name.startswith("job "))


def batch(engine: Engine) -> list[list[int]]:
    """Greedy tokens of the same requests, always in one batch."""
    body = {"input_ids": PROMPTS, "sampling_params": {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}}
    answer = engine.http.post("/generate", json=body)
    answer.raise_for_status()
    return [one["output_ids"] for one in answer.json()]


def test_the_kv_cache_shrinks_to_a_quarter_for_a_job_and_grows_back_under_load(
    engine: Engine, captain: Path, tmp_path: Path
) -> None:
    engine.pending.clear()
    assert engine.http.post("/flush_cache").status_code == 200
    alone = batch(engine)
    whole = memory(engine, lambda view: view.kv_tokens == view.kv_most_tokens)
    assert of_jobs(whole) == 0

    engine.train_beside_decode(version=31)
    job = spec(captain, tmp_path / "sharing", max_steps=5000, micro_batch_tokens=100)
    engine.run(job, token=31)
    quarter = memory(engine, lambda view: view.kv_tokens <= view.kv_most_tokens / 4 + 400 and of_jobs(view) > 0)
    engine.update("metric", job.job_id)
    assert quarter.used_bytes <= quarter.capacity_bytes
    assert batch(engine) == alone

    # Prompts that fill what is left: the open micro-batch is dropped, the pool grows, and nobody is turned away.
    with ThreadPoolExecutor(len(LONG)) as clients:
        answers = [clients.submit(generate, engine.http, prompt, 8, None) for prompt in LONG]
        engine.until(lambda m: isinstance(m, EngineNotice) and m.code == "memory_reclaimed")
        assert [len(answer.result()) for answer in answers] == [8] * len(LONG)
    engine.update("metric", job.job_id)  # and the job goes on where its last step ended
    taken = memory(engine, lambda view: view.reclaims > 0)
    assert taken.reclaim_ms is not None and taken.reclaim_ms > 0
    assert batch(engine) == alone

    engine.send(PauseJob(job_id=job.job_id, token=31))
    engine.update("paused", job.job_id)
    after = memory(engine, lambda view: view.kv_tokens == view.kv_most_tokens)
    assert (of_jobs(after), after.used_bytes) == (0, whole.used_bytes)
    assert engine.http.post("/flush_cache").status_code == 200
    assert batch(engine) == alone
    engine.until(lambda m: isinstance(m, Telemetry) and m.kv_used == 0)
    assert "leak" not in engine.log.read_text(errors="replace")
