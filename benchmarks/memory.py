"""What moving memory between KV cache and finetuning costs on this GPU.

    python -m benchmarks.memory [--data rows.parquet] [--seconds 20] [--quiet 20] [--burst 120] [--only arena|engines]

A KV cache of Llama-3-8B's shape (32 layers, 8 heads of 128, bf16) lies on the arena. Beside a decode step that is a
captured graph reading all of the weights' bytes and the KV of 32 requests of 1,024 tokens, 64k tokens are mapped and
unmapped by another thread, and 2 GiB of state are swapped out and back. Stretches with and without that take turns.

grow_64k_ms, shrink_64k_ms: wall time of one change off the step path, medians; the most beside them. Somebody else has
the pages in between, and they stay where they were (`native/pages.hpp`). put_64k_ms, clear_64k_ms: what the driver
takes to put as many where they have not been before, and to take them away from there. decode_p50_ratio,
decode_p99_ratio: the step while the first two take turns, 4 ms after each other, over the step undisturbed, and where
95 % of such ratios lie when the stretches are drawn again; driver_p50_ratio, driver_p99_ratio: while the other two do.
by_page: `put` and `clear` with pages of other sizes, no step beside. reclaim_ms: of an engine with a job at a burst of
requests, the slowest of its reclaims, from when the first request waited for memory until the job's was free (all its
moments: headroom.reclaims); raw_reclaim_ms: of the arena alone, until 7 GiB of a job are given up and the KV cache has
64k tokens more; given_up_ms: until a job's share has given up its activations, and its state, while the thread of the
engine does nothing, computes in Python, or has launched more kernels than the device takes. swap_gib_s: of the slower
way, out or back, at full rate; swap_paced: back at the engine's rate for that, and the share of decode steps meanwhile
beyond twice the undisturbed median. to_host: decode while tensors are copied to ordinary host memory, as a checkpoint's
are, by torch and by `core.memory.staging`. headroom: `benchmarks.headroom`, on a card of 40 GiB.

The arena's figures and each engine's are written to results/memory.json as soon as they are through; with --only those
of one of the two, beside the other's that it has. `engines`: when and with what the engines' were measured. Without a
GPU everything runs in a small form, to try the program: its figures say nothing, and go to results/memory_cpu.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks import headroom, record
from benchmarks.live import interval
from core.memory.arena import Arena, open_arena, pages_of
from core.memory.rate import GPU_RATE, Rate
from core.memory.rows import Rows
from core.memory.share import JobShare, StaticActivations
from core.memory.staging import Staging
from core.memory.swap import Scratch, Swappable, paced

GIB = 2**30
TURNS, SWAPS = 8, 4
_BETWEEN_S = 0.004  # the broker looks no more often, and another thread's Python would keep decode's waiting
PAGES = [2**21, 2**22, 2**23, 2**24, 2**25]


class Sizes(NamedTuple):
    """Of the KV cache: layers, heads and their size; tokens: that are mapped and unmapped; batch, context: of decode;
    bytes: of the weights, of what is swapped, and of a job's activations and state."""

    layers: int
    heads: int
    head_dim: int
    tokens: int
    weights: int
    batch: int
    context: int
    swapped: int
    job: int
    state: int

    @property
    def token_bytes(self) -> int:
        """Of K or V of one layer."""
        return self.heads * self.head_dim * 2


# The job: about what captured tasklets of 2,048 tokens and rank 16 take.
LLAMA_3_8B = Sizes(32, 8, 128, 64 * 1024, 15 * GIB, 32, 1024, 2 * GIB, 7 * GIB, 480 * 2**20)
SMALL = Sizes(4, 8, 128, 2048, GIB // 64, 2, 256, GIB // 16, GIB // 64, GIB // 128)


class Step:
    """A decode step's traffic: every weight is read once, and the KV of every request. A graph on a GPU."""

    def __init__(self, rows: Rows, sizes: Sizes, device: torch.device) -> None:
        self._weights = torch.zeros(sizes.weights // 2, dtype=torch.bfloat16, device=device)
        width = sizes.heads * sizes.head_dim
        self._columns = [
            rows.tensor(column, (rows.tokens, width), torch.bfloat16)[: sizes.batch * sizes.context]
            for column in range(2 * sizes.layers)
        ]
        self._out = torch.zeros((), dtype=torch.float32, device=device)
        self._graph = None
        self._run()
        if device.type == "cuda":
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._run()

    def _run(self) -> None:
        self._out.copy_(self._weights.sum(dtype=torch.float32))
        for column in self._columns:
            self._out += column.sum(dtype=torch.float32)

    def times(self, go_on: Callable[[], bool]) -> np.ndarray:
        """ms of each step while `go_on()`, of one at least. On a GPU between the ends of two steps, with the next one
        queued by then, as SGLang's overlap scheduler does it: what this thread waits for its turn does not count."""
        taken = []
        if self._graph is None:
            while not taken or go_on():
                taken.append(timed(self._run))
            return np.array(taken)
        last, this = self._launch(), self._launch()
        while not taken or go_on():
            following = self._launch()
            this.synchronize()
            taken.append(last.elapsed_time(this))
            last, this = this, following
        this.synchronize()
        return np.array(taken)

    def _launch(self) -> torch.cuda.Event:
        """A step; its end."""
        assert self._graph is not None
        self._graph.replay()
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        return end


def for_seconds(seconds: float) -> Callable[[], bool]:
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() < end


def beside(step: Step, work: Callable[[], None]) -> np.ndarray:
    """Step times while `work` runs in a thread. Raises what it raises."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    taken = step.times(thread.is_alive)
    thread.join()
    if failed:
        raise failed[0]
    return taken


def timed(call: Callable[[], object]) -> float:
    """ms of a call."""
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def resize(rows: Rows, step: Step, small: int, large: int, seconds: float) -> tuple[dict[str, Any], np.ndarray]:
    """What changing the KV cache's size costs, and the undisturbed steps."""
    tokens = rows.tokens_of(large) - rows.tokens_of(small)
    other = Rows(rows.arena, "another", rows.token_bytes, tokens)
    took: dict[str, list[float]] = {"grow": [], "shrink": [], "put": [], "clear": []}

    def to_and_fro() -> None:
        took["shrink"].append(timed(lambda: rows.resize(small)))
        other.resize(other.most)
        other.resize(0)
        took["grow"].append(timed(lambda: rows.resize(large)))

    def elsewhere_and_back() -> None:
        rows.resize(small)
        put_ms, clear_ms = elsewhere(rows, tokens)
        took["put"].append(put_ms)
        took["clear"].append(clear_ms)
        rows.resize(large)

    def going_on(change: Callable[[], None]) -> Callable[[], None]:
        def work() -> None:
            go_on = for_seconds(seconds / TURNS)
            while go_on():
                change()
                time.sleep(_BETWEEN_S)

        return work

    to_and_fro()  # the driver is asked for it
    for of in took.values():
        of.clear()
    turns: dict[str, list[np.ndarray]] = {"quiet": [], "decode": [], "driver": []}
    for _ in range(TURNS):
        to_and_fro()
        turns["quiet"].append(step.times(for_seconds(seconds / TURNS)))
        turns["decode"].append(beside(step, going_on(to_and_fro)))
        turns["driver"].append(beside(step, going_on(elsewhere_and_back)))
    undisturbed = np.concatenate(turns["quiet"])
    found: dict[str, Any] = {f"{name}_64k_ms": median(ms) for name, ms in took.items()}
    found |= {f"{name}_64k_most_ms": max(ms) for name, ms in took.items()}
    found |= {"changes": 2 * len(took["grow"]), "driver_changes": 2 * len(took["put"])}
    found["steps"] = {name: sum(map(len, of)) for name, of in turns.items()}
    for name, share in (("p50", 0.5), ("p99", 0.99)):

        def quantile(gaps: np.ndarray, share: float = share) -> float:
            return float(np.quantile(gaps, share))

        alone = quantile(undisturbed)
        found[f"decode_{name}_ms"] = alone
        found[f"decode_{name}_interval_ms"] = interval(turns["quiet"], quantile)
        for kind in ("decode", "driver"):
            found[f"{kind}_{name}_ratio"] = quantile(np.concatenate(turns[kind])) / alone
            found[f"{kind}_{name}_ratio_interval"] = [of / alone for of in interval(turns[kind], quantile)]
    return found, undisturbed


def elsewhere(rows: Rows, tokens: int) -> tuple[float, float]:
    """ms to put free pages for so many tokens behind columns like the pool's that are new, and to take them away."""
    others = [Rows(rows.arena, "another", rows.token_bytes, tokens)]
    put_ms = timed(lambda: others[0].resize(others[0].most))
    others[0].resize(0)
    return put_ms, timed(others.clear)


def reclaim(arena: Arena, rows: Rows, small: int, large: int, size: int) -> float:
    """ms until a job of so many bytes has given them up and the KV cache has grown."""
    rows.resize(small)
    job = arena.reserve("job", pages_of(arena, size))
    job.map(0, job.pages)

    def run() -> None:
        job.unmap(0, job.pages)
        rows.resize(large)

    return timed(run)


def given_up(arena: Arena, sizes: Sizes, device: torch.device) -> dict[str, list[float]]:
    """ms until a job's share has given up its activations, and until its state is out too, by what the thread that
    decides of it does meanwhile: nothing, Python, or launches into a queue that is full."""
    gpu = device.type == "cuda"
    factor = torch.ones(4096 if gpu else 64, 4096 if gpu else 64, dtype=torch.bfloat16, device=device)
    state, scratch = Swappable(arena, "job", [((sizes.state // 4,), torch.float32)]), Scratch(arena, "job")
    scratch.take((sizes.job,), torch.uint8)
    state.lock_pages()
    share = JobShare(state, StaticActivations(scratch), GPU_RATE if gpu else Rate())
    found: dict[str, list[float]] = {}
    engine: dict[str, Callable[[], object]] = {
        "nothing": lambda: time.sleep(1e-4), "python": lambda: sum(range(1000)), "kernels": lambda: factor @ factor,
    }  # fmt: skip
    for name, work in engine.items():
        share.grant(share.wanted)
        share.settle()
        for _ in range(3000 if gpu and name == "kernels" else 0):
            work()
        began = time.perf_counter()
        moves = share.give_up()
        while not moves[-1].query():
            work()
        share.check()
        found[name] = [(move.over_at - began) * 1e3 for move in moves if move.over_at is not None]
        if gpu:
            torch.cuda.synchronize()
    share.close()
    share.settle()
    return found


def swap(arena: Arena, step: Step, size: int, rate: Rate, target_ms: float) -> dict[str, Any]:
    """State that leaves and comes back, at `rate`, beside decode, some times."""
    state = Swappable(arena, "job", [((size // 4,), torch.float32)])
    locked = timed(state.lock_pages)
    paced(state.back(), Rate())
    state.tensors[0].normal_()
    if state.tensors[0].is_cuda:
        torch.cuda.synchronize()
    before = state.tensors[0].double().sum().item()
    seconds: dict[str, list[float]] = {"out": [], "back": []}

    def work() -> None:
        for _ in range(SWAPS):
            seconds["out"].append(timed(state.out) / 1e3)
            seconds["back"].append(timed(lambda: paced(state.back(), rate)) / 1e3)

    taken = beside(step, work)
    if state.tensors[0].double().sum().item() != before:
        raise AssertionError("what came back is not what went out")
    found: dict[str, Any] = {"lock_pages_ms": locked, "first_out_gib_s": size / GIB / seconds["out"][0]}
    found |= {f"{way}_gib_s": size / GIB / median(of[1:]) for way, of in seconds.items()}
    state.forget()
    return found | {
        "decode_p50_ms": float(np.quantile(taken, 0.5)), "decode_p99_ms": float(np.quantile(taken, 0.99)),
        "target_ms": target_ms, "missed": float((taken > target_ms).mean()), "steps": len(taken),
    }  # fmt: skip


def to_host(step: Step, size: int, device: torch.device, target_ms: float) -> dict[str, dict[str, float]]:
    """Decode beside copies of so many bytes, by each way that there is."""
    source, staging = torch.ones(size, dtype=torch.uint8, device=device), Staging(device)
    found = {}
    for name, copy in (("torch", torch.Tensor.cpu), ("staging", staging.fetch)):
        seconds: list[float] = []

        def work(copy: Callable[[torch.Tensor], torch.Tensor] = copy, seconds: list[float] = seconds) -> None:
            stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
            for _ in range(SWAPS):
                with torch.cuda.stream(stream):
                    seconds.append(timed(lambda: copy(source)) / 1e3)

        taken = beside(step, work)
        found[name] = {
            "gib_s": size / GIB / median(seconds), "decode_p50_ms": float(np.quantile(taken, 0.5)),
            "decode_most_ms": float(taken.max()), "missed": float((taken > target_ms).mean()), "steps": len(taken),
        }  # fmt: skip
    return found


def of_pages(sizes: Sizes, device: torch.device, page: int) -> dict[str, Any]:
    """What `put` and `clear` take with pages of another size, no decode beside them."""
    columns = [sizes.token_bytes] * (2 * sizes.layers)
    arena = open_arena(device, sum(columns) * sizes.tokens, page)
    rows = Rows(arena, "kv cache", columns, sizes.tokens)
    rows.resize(rows.most)  # makes the pages
    rows.resize(0)
    took = [elsewhere(rows, sizes.tokens) for _ in range(3)]
    put_ms, clear_ms = (median(ms) for ms in zip(*took, strict=True))
    return {"page_mib": page / 2**20, "put_64k_ms": put_ms, "clear_64k_ms": clear_ms}


def measure(sizes: Sizes, device: torch.device, seconds: float) -> dict[str, Any]:
    """All figures but the engines'; on a GPU the arena takes 24 GiB."""
    kept = sizes.batch * sizes.context
    columns = [sizes.token_bytes] * (2 * sizes.layers)
    arena = open_arena(device, 2 * sum(columns) * (kept + sizes.tokens))
    rows = Rows(arena, "kv cache", columns, kept + sizes.tokens)
    small, large = rows.rows_of(kept), rows.most
    rows.resize(large)
    step = Step(rows, sizes, device)
    step.times(for_seconds(min(1.0, seconds)))  # the clocks are up
    found, undisturbed = resize(rows, step, small, large, seconds)
    raw = [reclaim(arena, rows, small, large, sizes.job) for _ in range(3)]
    by_page = [of_pages(sizes, device, page) for page in PAGES] if device.type == "cuda" else []
    rows.resize(small)
    given = given_up(arena, sizes, device)
    target = 2.0 * float(np.quantile(undisturbed, 0.5))
    full = swap(arena, step, sizes.swapped, Rate(), target)
    return found | {
        "tokens": sizes.tokens, "pages": pages_of(arena, sizes.tokens * sizes.token_bytes) * len(columns),
        "page_mib": arena.page_bytes / 2**20, "by_page": by_page, "raw_reclaim_ms": raw,
        "given_up_ms": given,
        "swap_gib_s": min(full["out_gib_s"], full["back_gib_s"]), "swap": full,
        "swap_paced": swap(arena, step, sizes.swapped, GPU_RATE, target),
        "to_host": to_host(step, sizes.swapped // 12, device, target),
    }  # fmt: skip


def main() -> None:
    """Measure and write; the arena first, since engines take longer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a normalised data set for the job; without one the sample")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the steps without and of those with changes")
    parser.add_argument("--quiet", type=float, default=20.0, help="seconds of the job alone, for the head-room")
    parser.add_argument("--burst", type=float, default=120.0, help="seconds of requests beside it, at most")
    parser.add_argument("--only", choices=("arena", "engines"), help="leave the other's figures as they are")
    arguments = parser.parse_args()
    gpu = torch.cuda.is_available()
    name = "memory" if gpu else "memory_cpu"
    made = record.provenance("torch", "sglang")
    path = record.RESULTS / f"{name}.json"
    body = json.loads(path.read_text()) if arguments.only and path.is_file() else {}
    if arguments.only != "engines":
        body |= made | {"gpu": torch.cuda.get_device_name() if gpu else None}
        sizes, device = (LLAMA_3_8B, torch.device("cuda", 0)) if gpu else (SMALL, torch.device("cpu"))
        body |= measure(sizes, device, arguments.seconds)
        print(record.write(name, body), body, flush=True)
    if arguments.only == "arena":
        return
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()  # the engines want the GPU to themselves
    body |= {"headroom": [], "engines": made}
    for row in headroom.measure(arguments.data, arguments.quiet, arguments.burst):
        body["headroom"].append(row)
        body["reclaim_ms"] = max(body["headroom"][0]["reclaim_ms"], default=None)
        print(record.write(name, body), row, flush=True)


if __name__ == "__main__":
    main()
