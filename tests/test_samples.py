"""A job on the real engine: its adapter answers on the way, the best one is kept, and its speed is what the next
estimate goes by."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from core.api.job_schemas import JobEstimate
from tests.stack import Stack, until

pytestmark = pytest.mark.engine


def test_an_adapter_answers_while_it_is_trained(stack: Stack, tmp_path: Path) -> None:
    client = stack.client
    rows = [{"prompt": f"What is {n} and {n}?", "completion": f"Aye, {n} and {n} be {2 * n}."} for n in range(12)]
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    dataset = client.upload_dataset(path, "sums")
    job = client.submit_job(
        dataset=dataset.id,
        adapter_name="sums",
        max_steps=3,
        evaluation_fraction=0.2,
        evaluate_every=1,
        keep_best=True,
        sample_prompts=["What is 3 and 3?"],
        sample_tokens=8,
        deploy=False,
    )
    client.wait(job.id, timeout_s=300)
    said = until(lambda: [sample for sample in client.job_samples(job.id) if sample.step == 3], 60, "the last sample")
    assert said[0].prompt == "What is 3 and 3?" and said[0].answer and said[0].tokens
    done = client.job(job.id)
    evaluated = [metric for metric in client.job_metrics(job.id) if metric.eval_loss is not None]
    best = min(evaluated, key=lambda metric: metric.eval_loss or 0.0)
    assert (done.state, done.best_step, done.best_loss) == ("succeeded", best.step, best.eval_loss)
    assert done.expected_tokens == pytest.approx(done.tokens, rel=0.5), "to within the unevenness of micro-batches"
    loaded = [model["id"] for model in httpx.get(f"{stack.engine_url}/v1/models").json()["data"]]
    assert not [name for name in loaded if name.startswith("~")], "the sampled adapter is not left behind"

    def estimate() -> JobEstimate:
        return client.estimate_job(dataset=dataset.id, adapter_name="more", max_steps=30)

    steps = 3
    while (found := estimate()).speed is None and steps < 1000:
        steps *= 4  # a fast machine was through before a speed was measured
        longer = client.submit_job(dataset=dataset.id, adapter_name="sums", max_steps=steps, deploy=False)
        client.wait(longer.id, timeout_s=300)
    assert found.speed is not None and found.speed.tokens_s > 0
    assert found.seconds == pytest.approx((found.tokens or 0) / found.speed.tokens_s)
