"""How many requests fit beside a finetune job: the elastic KV cache against a fixed split of the same memory.

    python -m benchmarks.headroom [--data rows.parquet] [--quiet 20] [--burst 120]

Two engines, one after the other, get the same bytes for KV cache and finetuning. ``elastic``: both share one arena.
``fixed``: the KV cache has what the most that the job ever held in the first engine leaves, for good. Each serves a job
and nothing else for a while, then a burst of more requests of one length than can run at once.

Rows: layout; concurrent_requests: the most that ran at once; retractions: requests that were put back for want of KV
slots; finetune_tokens_s: of the quiet stretch, and of the whole run; reclaim_ms: of the elastic one, each time that the
job gave memory up, from when the first request waited for it (or from the decision, where none did yet) until the job's
pages were free; reclaims: the same in words, with the moments in between: the decision, the end of what the job had
queued, when the KV cache had the pages and when the request that had been too large for it ran. On a GPU the engine has
Llama-3-8B's shape with random weights, requests of 2,048 tokens and the memory of a card of 40 GiB; on a CPU the
bundled model, requests of 544 tokens and a KV cache of 16,384. This program prints; `benchmarks.memory` keeps a GPU's
rows.
"""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.live import ROOT, Served, ingested, made_up
from core.config import Settings
from core.link.messages import EngineNotice, FromEngine, Telemetry
from core.memory.arena import page_bytes
from core.runtime.profiles import PROFILES
from core.serving import model_folder
from core.torchvision_ops import declare

GIB = 2**30
PATIENT_MS = 60_000.0  # memory is what is compared, so no latency target holds the job back
_RETRACTED = re.compile(r"#retracted_reqs: (\d+)")


class Setup(NamedTuple):
    """token_bytes: of the KV cache; tokens: of the full pool; prompt, answer: tokens of a request; options: of
    `Served`."""

    model: Path
    token_bytes: int
    tokens: int
    prompt: int
    answer: int
    options: Namespace


class Told(Served):
    """An engine that is listened to. reclaims: what it tells of each time that the job gives memory up."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.reclaims: list[str] = []

    def _take(self, engine: str, message: FromEngine, seen: list[Telemetry]) -> None:
        super()._take(engine, message, seen)
        if isinstance(message, EngineNotice) and message.code == "memory_reclaimed":
            self.reclaims.append(message.message)


def _options(shape: str, batches: list[int], micro_batch: int) -> Namespace:
    """Few partitions, whose graphs and profile take time at the start."""
    return Namespace(
        shape=shape, batches=batches, places=None, micro_batch_tokens=micro_batch, attention=None, partitions=2,
        lora_backend=None,
    )  # fmt: skip


def on_a_cpu() -> Setup:
    """The bundled model in fp32: 30 layers, 3 heads of 64."""
    model = model_folder.ensure(Settings(data_dir=ROOT / ".cache"))
    return Setup(model, 30 * 2 * 3 * 64 * 4, 16_384, 512, 32, _options("bundled", [64], 96))


def on_a_gpu(folder: Path, limit: int) -> Setup:
    """Llama-3-8B's shape, and `limit` bytes less its weights and 6 GiB for CUDA, decode graphs and workspaces, in whole
    rows of the elastic KV cache with the slot that SGLang adds."""
    bundled = model_folder.ensure(Settings(data_dir=ROOT / ".cache"))
    model = made_up(folder / "llama-3-8b", "llama-3-8b", bundled)
    column_bytes = 8 * 128 * 2  # of a token
    token_bytes = 32 * 2 * column_bytes
    row_tokens = page_bytes(torch.device("cuda", 0)) // column_bytes
    tokens = (limit - 15 * GIB - 6 * GIB) // token_bytes // row_tokens * row_tokens - 1
    return Setup(model, token_bytes, tokens, 1920, 128, _options("llama-3-8b", [96], 2048))


def one(
    setup: Setup, tokens: int, elastic: bool, folder: Path, data: Path, quiet_s: float, burst_s: float
) -> tuple[dict[str, Any], int]:
    """A row of the table, and the most bytes that the job ever held."""
    folder.mkdir(exist_ok=True)
    settings = {"MAX_TOTAL_TOKENS": str(tokens), "ELASTIC_KV": str(elastic).lower()}
    with Told("harli", folder, setup.model, setup.options, None, settings) as engine:
        engine.target(PATIENT_MS)
        engine.start_job(data, setup.options)
        engine.watch(until=lambda: engine.told("metric") > 0, seconds=300.0)
        if not engine.told("metric"):
            raise TimeoutError("the job made no step within five minutes")
        quiet = engine.watch(seconds=quiet_s)
        wanted = 2 * setup.tokens // (setup.prompt + setup.answer)
        prompts = np.random.default_rng(0).integers(100, 40_000, (wanted, setup.prompt)).tolist()

        def ask(prompt: list[int]) -> bool:
            body = {
                "input_ids": prompt,
                "sampling_params": {"temperature": 0.0, "max_new_tokens": setup.answer, "ignore_eos": True},
            }
            try:
                return httpx.post(f"{engine.settings.engine_url}/generate", json=body, timeout=burst_s).is_success
            except httpx.HTTPError:
                return False  # still in the queue when the time was up

        with ThreadPoolExecutor(wanted) as clients:
            answers = [clients.submit(ask, prompt) for prompt in prompts]
            burst = engine.watch(until=lambda: all(answer.done() for answer in answers), seconds=burst_s)
            for answer in answers:
                answer.cancel()
        log = (folder / "harli.log").read_text(errors="replace")
    seen = quiet + burst
    views = [report.memory for report in seen if report.memory is not None]
    held = [owner.high_water_bytes for view in views for owner in view.owners if owner.name.startswith("job ")]
    row: dict[str, Any] = {
        "layout": "elastic" if elastic else "fixed",
        "kv_tokens": tokens,
        "concurrent_requests": max((report.running for report in seen), default=0),
        "answered": sum(not answer.cancelled() and answer.result() for answer in answers),
        "retractions": sum(int(found) for found in _RETRACTED.findall(log)),
        "finetune_tokens_s": _tokens_s(quiet),
        "finetune_tokens_s_whole": _tokens_s(seen),
        "reclaim_ms": list({view.reclaims: round(view.reclaim_ms, 1) for view in views if view.reclaim_ms}.values()),
        "reclaims": engine.reclaims,
    }
    return row, max(held, default=0)


def _tokens_s(seen: list[Telemetry]) -> float:
    seconds = sum(report.interval_s for report in seen)
    return sum(report.finetune_tokens for report in seen) / seconds if seconds else 0.0


def rows(setup: Setup, folder: Path, data: Path, quiet_s: float, burst_s: float) -> Iterator[dict[str, Any]]:
    """Of both layouts; the second engine has the first one's profile of the machine."""
    elastic, held = one(setup, setup.tokens, True, folder / "elastic", data, quiet_s, burst_s)
    yield elastic | {"job_bytes": held}
    fixed = folder / "fixed"
    fixed.mkdir()
    if (taken := folder / "elastic" / PROFILES).is_dir():
        shutil.copytree(taken, fixed / PROFILES)
    yield one(setup, setup.tokens - held // setup.token_bytes, False, fixed, data, quiet_s, burst_s)[0]


def measure(data: Path | None, quiet_s: float, burst_s: float) -> Iterator[dict[str, Any]]:
    """On this machine, a row as soon as it is through; without `data` the sample data set is taken in."""
    declare()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        setup = on_a_gpu(folder, 40 * GIB) if torch.cuda.is_available() else on_a_cpu()
        yield from rows(setup, folder, data.resolve() if data else ingested(folder, setup.model), quiet_s, burst_s)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a normalised data set; without one the sample is taken in")
    parser.add_argument("--quiet", type=float, default=20.0, help="seconds of the job alone")
    parser.add_argument("--burst", type=float, default=120.0, help="seconds of requests beside it, at most")
    arguments = parser.parse_args()
    found = list(measure(arguments.data, arguments.quiet, arguments.burst))
    columns = [key for key in found[1] if key != "reclaims"]
    table = Table(*columns, title="Head-room beside a finetune job")
    for row in found:
        table.add_row(*(f"{row[key]:.1f}" if isinstance(row[key], float) else str(row[key]) for key in columns))
    Console(width=160).print(table)
    print(*found[0]["reclaims"], sep="\n")
    print(f"the job held {found[0]['job_bytes'] / 2**20:.0f} MiB at most")


if __name__ == "__main__":
    main()
