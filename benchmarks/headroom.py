"""How many requests fit beside a finetune job: the elastic KV cache against a fixed split of the same memory.

    python -m benchmarks.headroom [--quiet 20] [--burst 40]

Two engines, one after the other, get the same bytes for KV cache and finetuning. ``elastic``: both share one arena.
``fixed``: the KV cache has what the most that the job ever held in the first engine leaves, for good. Each serves a job
and nothing else for a while, then a burst of more requests of one length than can run at once.

Rows: layout; concurrent_requests: the most that ran at once; retractions: requests that were put back for want of KV
slots; finetune_tokens_s: of the quiet stretch, and of the whole run. On a GPU the engine has Llama-3-8B's shape with
random weights, requests of 2,048 tokens and the memory of a card of 40 GiB; on a CPU the bundled model, requests of 544
tokens and a KV cache of 16,384. This program prints; `benchmarks.memory` keeps a GPU's rows.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from core.config import Settings
from core.intake import dataset, tokenizer
from core.link.messages import FromEngine, Hello, JobSpec, JobUpdate, SetTargets, StartJob, Target, Telemetry
from core.link.transport import ControlEnd
from core.serving import model_folder
from core.torchvision_ops import declare

ROOT = Path(__file__).resolve().parent.parent
PORT = 18721
GIB = 2**30
_RETRACTED = re.compile(r"#retracted_reqs: (\d+)")

LLAMA_3_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 8192,
    "tie_word_embeddings": False, "rope_theta": 500000.0, "dtype": "bfloat16",
}  # fmt: skip


class Setup(NamedTuple):
    """token_bytes: of the KV cache; tokens: of the full pool; prompt, answer: tokens of a request; micro_batch: tokens;
    arguments: of SGLang."""

    model: Path
    token_bytes: int
    tokens: int
    prompt: int
    answer: int
    micro_batch: int
    arguments: dict[str, Any]


def on_a_cpu() -> Setup:
    """The bundled model in fp32: 30 layers, 3 heads of 64."""
    model = model_folder.ensure(Settings(data_dir=ROOT / ".cache"))
    return Setup(model, 30 * 2 * 3 * 64 * 4, 16_384, 512, 32, 96, {})


def on_a_gpu(folder: Path, limit: int) -> Setup:
    """Llama-3-8B's shape, and `limit` bytes less its weights and 6 GiB for CUDA, decode graphs and workspaces."""
    bundled = model_folder.ensure(Settings(data_dir=ROOT / ".cache"))
    model = folder / "llama-3-8b-random"
    shutil.copytree(bundled, model, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((model / "config.json").read_text()) | LLAMA_3_8B
    (model / "config.json").write_text(json.dumps(config))
    token_bytes = 32 * 2 * 8 * 128 * 2
    tokens = (limit - 15 * GIB - 6 * GIB) // token_bytes
    return Setup(model, token_bytes, tokens, 1920, 128, 2048, {"load_format": "dummy"})


class Engine:
    """A running engine's link; `seen` has all telemetry so far."""

    def __init__(self, settings: Settings) -> None:
        self._end = ControlEnd(settings.resolved_link_url)
        self.id = ""
        self.seen: list[Telemetry] = []

    def send(self, message: SetTargets | StartJob) -> None:
        self._end.send(self.id, message)

    def read(self, until: Callable[[FromEngine], bool], seconds: float) -> bool:
        """Whether such a message came in time."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            got = self._end.receive(max(1, int(left * 1e3)))
            if got is None:
                continue
            self.id, message = got
            if isinstance(message, Telemetry):
                self.seen.append(message)
            if isinstance(message, JobUpdate) and message.kind == "failed":
                raise RuntimeError(message.message)
            if until(message):
                return True
        return False

    def close(self) -> None:
        self._end.close()


@contextmanager
def running(setup: Setup, tokens: int, elastic: bool, folder: Path) -> Iterator[tuple[Engine, Path]]:
    """An engine with a KV cache of `tokens`, and its log."""
    folder.mkdir()
    settings = Settings(data_dir=folder, engine_port=PORT)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HARLI")} | {
        "HARLI_DATA_DIR": str(folder),
        "HARLI_ENGINE_PORT": str(PORT),
        "HARLI_ENGINE__MODEL": str(setup.model),
        "HARLI_ENGINE__MAX_TOTAL_TOKENS": str(tokens),
        "HARLI_ENGINE__MAX_RUNNING_REQUESTS": "256",
        "HARLI_ENGINE__ELASTIC_KV": str(elastic).lower(),
        "HARLI_ENGINE__ARGUMENTS": json.dumps(setup.arguments),
        "HARLI_FINETUNE__MICRO_BATCH_TOKENS": str(setup.micro_batch),
    }
    log = folder / "engine.log"
    engine = Engine(settings)
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "core.serving"], env=environment, cwd=ROOT, stdout=out, stderr=out
        )
    try:
        if not engine.read(lambda message: isinstance(message, Hello), 600):
            raise TimeoutError(f"the engine did not start:\n{log.read_text(errors='replace')[-2000:]}")
        yield engine, log
    finally:
        process.terminate()
        process.wait()
        engine.close()


def one(
    setup: Setup, tokens: int, elastic: bool, folder: Path, data: Path, quiet_s: float, burst_s: float
) -> tuple[dict[str, Any], int]:
    """A row of the table, and the most bytes that the job ever held."""
    with running(setup, tokens, elastic, folder) as (engine, log):
        engine.send(SetTargets(version=1, targets=(Target(kind="itl", ms=60_000.0),)))
        spec = JobSpec(
            job_id="headroom", dataset_path=str(data), adapter_name="headroom", output_dir=str(folder / "job"),
            epochs=None, max_steps=1_000_000, micro_batch_tokens=setup.micro_batch, sequence_length=setup.micro_batch,
            evaluation_fraction=0.0, checkpoint_every=1_000_000,
        )  # fmt: skip
        engine.send(StartJob(spec=spec, token=1))
        if not engine.read(lambda message: isinstance(message, JobUpdate) and message.kind == "metric", 300):
            raise TimeoutError("the job made no step")
        engine.seen.clear()
        engine.read(lambda _: False, quiet_s)
        quiet = len(engine.seen)
        wanted = 2 * setup.tokens // (setup.prompt + setup.answer)
        prompts = np.random.default_rng(0).integers(100, 40_000, (wanted, setup.prompt)).tolist()

        def ask(prompt: list[int]) -> bool:
            body = {
                "input_ids": prompt,
                "sampling_params": {"temperature": 0.0, "max_new_tokens": setup.answer, "ignore_eos": True},
            }
            try:
                return httpx.post(f"http://127.0.0.1:{PORT}/generate", json=body, timeout=burst_s).is_success
            except httpx.HTTPError:
                return False  # still in the queue when the time was up

        with ThreadPoolExecutor(wanted) as clients:
            answers = [clients.submit(ask, prompt) for prompt in prompts]
            engine.read(lambda _: all(answer.done() for answer in answers), burst_s)
            for answer in answers:
                answer.cancel()
        held = [owner.high_water_bytes for report in engine.seen if report.memory is not None
                for owner in report.memory.owners if owner.name.startswith("job ")]  # fmt: skip
        row = {
            "layout": "elastic" if elastic else "fixed",
            "kv_tokens": tokens,
            "concurrent_requests": max(report.running for report in engine.seen),
            "answered": sum(answer.done() and not answer.cancelled() and answer.result() for answer in answers),
            "retractions": sum(int(found) for found in _RETRACTED.findall(log.read_text(errors="replace"))),
            "finetune_tokens_s": _tokens_s(engine.seen[:quiet]),
            "finetune_tokens_s_whole": _tokens_s(engine.seen),
        }
        return row, max(held, default=0)


def _tokens_s(seen: list[Telemetry]) -> float:
    seconds = sum(report.interval_s for report in seen)
    return sum(report.finetune_tokens for report in seen) / seconds if seconds else 0.0


def rows(setup: Setup, folder: Path, quiet_s: float, burst_s: float) -> list[dict[str, Any]]:
    """Both layouts."""
    data = folder / "captain.parquet"
    source = ROOT / "sample_data/captain.jsonl"
    dataset.ingest(source, data, filename=source.name, tokenizer=tokenizer.load(setup.model))
    elastic, held = one(setup, setup.tokens, True, folder / "elastic", data, quiet_s, burst_s)
    left = setup.tokens - held // setup.token_bytes
    fixed, _ = one(setup, left, False, folder / "fixed", data, quiet_s, burst_s)
    return [elastic | {"job_bytes": held}, fixed]


def measure(quiet_s: float, burst_s: float) -> list[dict[str, Any]]:
    """On this machine."""
    declare()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        setup = on_a_gpu(folder, 40 * GIB) if torch.cuda.is_available() else on_a_cpu()
        return rows(setup, folder, quiet_s, burst_s)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quiet", type=float, default=20.0, help="seconds of the job alone")
    parser.add_argument("--burst", type=float, default=40.0, help="seconds of requests beside it, at most")
    arguments = parser.parse_args()
    found = measure(arguments.quiet, arguments.burst)
    table = Table(*found[1], title="Head-room beside a finetune job")
    for row in found:
        table.add_row(*(f"{row[key]:.1f}" if isinstance(row[key], float) else str(row[key]) for key in found[1]))
    Console(width=160).print(table)
    print(f"the job held {found[0]['job_bytes'] / 2**20:.0f} MiB at most")


if __name__ == "__main__":
    main()
