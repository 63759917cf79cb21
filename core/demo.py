"""``python -m core.demo``, a part of `harli up --demo`: sample traffic for ever, and the sample job once.

The data set, the trace and the prompts lie in ``sample_data/``. The job is a job like any other: paused, stopped or
deleted, it stays so, and a store that has seen it is not given it again.
"""

from __future__ import annotations

import asyncio
import sys
from itertools import count
from pathlib import Path

import core
from core.api import schemas
from core.client import Client, connect
from core.config import Settings
from core.errors import HarliError, NotFound
from core.workload.load import replay, summarise
from core.workload.traces import read_trace

SAMPLES = Path(core.__file__).resolve().parent.parent / "sample_data"
NAME = "captain"


def submit_sample(client: Client) -> schemas.Job | None:
    """Upload the sample data set and submit the sample job; None when the store has had a job on it already.

    Raises NotFound when the sample data is not there, and what the API answers.
    """
    try:
        dataset = client.dataset(NAME)
    except NotFound:
        dataset = client.upload_dataset(_sample("captain.jsonl"), NAME)
    cursor: str | None = None
    while True:
        page = client.jobs(cursor=cursor)
        if any(job.dataset_name == NAME for job in page.items):
            return None
        cursor = page.next
        if cursor is None:
            break
    return client.submit_job(
        idempotency_key=f"demo-{dataset.id}",
        dataset=dataset.id,
        adapter_name=NAME,
        name="Sample: answer like a ship's captain",
        epochs=2,
    )


async def traffic(client: Client, settings: Settings) -> None:
    """Replay the sample trace in a loop, for ever. A round's figures are one line of the log."""
    arrivals = read_trace(_sample("demo_trace.csv"))
    prompts = _sample("prompts.txt").read_text("utf-8").splitlines()
    for number in count(1):
        model = client.engine().model or "default"
        results = await replay(arrivals, settings.engine_url, [model], prompts, seed=number)
        figures = summarise(results)
        print(
            f"round {number}: {figures.requests} requests, {figures.tokens_s:.1f} tokens/s, ITL p50 "
            f"{figures.itl_ms.p50} ms, p99 {figures.itl_ms.p99} ms, errors {figures.errors or 'none'}",
            flush=True,
        )


def _sample(name: str) -> Path:
    path = SAMPLES / name
    if not path.is_file():
        raise NotFound("sample_missing", f"there is no {path}; run the demonstration from a checkout", "sample_data")
    return path


def main() -> int:
    settings = Settings()
    try:
        with connect(settings.api_url) as client:
            job = submit_sample(client)
            print(f"submitted {job.id}" if job else "the sample job is there already", flush=True)
            asyncio.run(traffic(client, settings))
    except HarliError as error:
        print(f"error: {error.message} [{error.code}]", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
