"""What co-location costs and gives on a CPU: ``python -m benchmarks.colocation_cpu``

Two figures, each of two things measured in turns on the same machine in one run:

- decode's ITL (as a client sees it) from the engine without a job, against SGLang with the same arguments, no plugin;
- finetuning's tokens/s in the idle engine, against a plain Hugging Face + peft loop on the same packed batches.

Nothing else may run meanwhile. Takes about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import os

# As the engine has it, and before torch is imported: threads that spin would slow the plain loop on a shared machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks import record
from core.config import Settings
from core.intake import dataset, packing, tokenizer
from core.link.messages import FromEngine, Hello, JobSpec, JobUpdate, StartJob
from core.link.transport import ControlEnd
from core.serving import model_folder
from core.torchvision_ops import declare

ROOT = Path(__file__).resolve().parent.parent
PORTS = {"harli": 18711, "plain": 18712}
MICRO_BATCH = 256
STEPS_A_TURN = 8


def start(name: str, settings: Settings, model: Path, stack: ExitStack) -> None:
    """Start ``harli`` (the engine) or ``plain`` (SGLang alone) and wait until it answers."""
    log = stack.enter_context((settings.data_dir / f"{name}.log").open("wb"))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HARLI")}
    if name == "harli":
        command = [sys.executable, "-m", "core.serving"]
        environment |= {
            "HARLI_DATA_DIR": str(settings.data_dir),
            "HARLI_ENGINE_PORT": str(PORTS[name]),
            "HARLI_ENGINE__MODEL": str(model),
        }
    else:
        command = [sys.executable, "-m", "tests.serving.plain_sglang", str(model), str(PORTS[name])]
    process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log)
    stack.callback(process.wait)
    stack.callback(process.terminate)


def gaps(port: int, tokens: int) -> list[float]:
    """The gaps (ms) between the tokens of one streamed greedy answer."""
    body = {
        "input_ids": list(range(100, 132)),
        "sampling_params": {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True},
        "stream": True,
    }
    moments = []
    with httpx.stream("POST", f"http://127.0.0.1:{port}/generate", json=body, timeout=120.0) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                moments.append(time.perf_counter())
    return [(b - a) * 1e3 for a, b in itertools.pairwise(moments)]


def decode(rounds: int, tokens: int) -> dict[str, Any]:
    """ITL without a job, plugin against none, in turns that change places each round."""
    seen: dict[str, list[list[float]]] = {"harli": [], "plain": []}
    for n in range(rounds):
        for name in ("harli", "plain") if n % 2 else ("plain", "harli"):
            seen[name].append(gaps(PORTS[name], tokens)[1:])
    p50 = {name: median(g for answer in answers for g in answer) for name, answers in seen.items()}
    # The spread of the ratio: rounds drawn again with replacement.
    random = np.random.default_rng(0)
    ratios = []
    for _ in range(2000):
        picked = random.integers(0, rounds, rounds)
        medians = [np.median(np.concatenate([seen[name][i] for i in picked])) for name in ("harli", "plain")]
        ratios.append(medians[0] / medians[1])
    low, high = np.quantile(ratios, [0.025, 0.975])
    return {
        "tokens": rounds * (tokens - 2),
        "itl_p50_ms": p50["harli"],
        "plain_itl_p50_ms": p50["plain"],
        "ratio": p50["harli"] / p50["plain"],
        "ratio_low": float(low),
        "ratio_high": float(high),
    }


class Link:
    """The control plane's end, for the benchmark's own jobs."""

    def __init__(self, settings: Settings) -> None:
        self._end = ControlEnd(settings.resolved_link_url)
        self._engine = ""

    def wait(self, wanted: type[FromEngine] | str) -> FromEngine:
        while True:
            got = self._end.receive(600_000)
            if got is None:
                raise TimeoutError(f"the engine did not send {wanted}")
            self._engine, message = got
            if isinstance(message, JobUpdate) and message.kind == "failed":
                raise RuntimeError(message.message)
            if isinstance(wanted, str):
                if isinstance(message, JobUpdate) and message.kind == wanted:
                    return message
            elif isinstance(message, wanted):
                return message

    def run(self, spec: JobSpec) -> list[JobUpdate]:
        """Run a job to its end; returns its steps' metrics."""
        self._end.send(self._engine, StartJob(spec=spec, token=1))
        self.wait("started")
        metrics: list[JobUpdate] = []
        while len(metrics) < (spec.max_steps or 0):
            update = self.wait("metric")
            assert isinstance(update, JobUpdate)
            metrics.append(update)
        self.wait("succeeded")
        return metrics


def finetune(link: Link, model: Path, data: Path, folder: Path, rounds: int) -> dict[str, Any]:
    """Tokens/s without traffic: the engine's trainer and the plain loop in turns on the same batches."""
    from transformers import AutoModelForCausalLM

    from benchmarks import plain_loop

    rows = packing.load_encoded(data, tokenizer.load(model))
    plan = packing.epoch_plan([len(r.ids) for r in rows], MICRO_BATCH, seed=0, epoch=0)[:STEPS_A_TURN]
    batches = [[packing.build([rows[i] for i in pack], MICRO_BATCH)] for pack in plan]
    tokens = [batch[0].tokens for batch in batches]
    ours: list[float] = []
    theirs: list[float] = []
    for n in range(rounds):
        spec = JobSpec(
            job_id=f"round-{n}",
            dataset_path=str(data),
            adapter_name="benchmark",
            output_dir=str(folder / f"round-{n}"),
            epochs=None,
            max_steps=STEPS_A_TURN,
            micro_batch_tokens=MICRO_BATCH,
            sequence_length=MICRO_BATCH,
            evaluation_fraction=0.0,
            checkpoint_every=1000,
        )
        times = [update.time for update in link.run(spec)]
        ours += [t / (b - a) for t, a, b in zip(tokens[1:], times, times[1:], strict=False)]
        plain = plain_loop.train(
            AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            batches,
            rank=8,
            alpha=16,
            learning_rate=1e-3,
            max_grad_norm=1.0,
            seed=0,
        )
        theirs += [t / s for t, s in zip(tokens[1:], plain.seconds[1:], strict=True)]
    return {
        "micro_batch_tokens": MICRO_BATCH,
        "steps": len(ours),
        "tokens_s": median(ours),
        "plain_tokens_s": median(theirs),
        "ratio": median(ours) / median(theirs),
    }


def main() -> None:
    """Measure, print the table, write ``results/colocation_cpu.json``."""
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--rounds", type=int, default=12, help="answers a side, of 42 tokens each")
    arguments.add_argument("--turns", type=int, default=3, help=f"finetuning turns a side, {STEPS_A_TURN} steps each")
    chosen = arguments.parse_args()
    declare()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        settings = Settings(data_dir=folder)
        model = model_folder.ensure(Settings(data_dir=ROOT / ".cache"))
        data = folder / "captain.parquet"
        source = ROOT / "sample_data/captain.jsonl"
        dataset.ingest(source, data, filename=source.name, tokenizer=tokenizer.load(model))
        link = Link(settings)
        for part in PORTS:
            start(part, settings, model, stack)
        hello = link.wait(Hello)
        assert isinstance(hello, Hello)
        _answers(PORTS["plain"])
        for port in PORTS.values():
            gaps(port, 16)
        body = {
            **record.provenance("sglang", "torch", "transformers", "peft"),
            "model": hello.model,
            "dtype": hello.dtype,
            "decode": decode(chosen.rounds, 42),
            "finetune": finetune(link, model, data, folder, chosen.turns),
        }
    table = Table("", "Harli", "alone", "ratio", title="Co-location on a CPU")
    d, f = body["decode"], body["finetune"]
    table.add_row(
        "ITL p50 without a job, ms",
        f"{d['itl_p50_ms']:.1f}",
        f"{d['plain_itl_p50_ms']:.1f}",
        f"{d['ratio']:.3f} ({d['ratio_low']:.3f}-{d['ratio_high']:.3f})",
    )
    table.add_row("finetuning, tokens/s", f"{f['tokens_s']:.0f}", f"{f['plain_tokens_s']:.0f}", f"{f['ratio']:.3f}")
    Console().print(table)
    print(record.write("colocation_cpu", body))


def _answers(port: int) -> None:
    for _ in range(600):
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise TimeoutError(f"nothing answers on port {port}")


if __name__ == "__main__":
    main()
