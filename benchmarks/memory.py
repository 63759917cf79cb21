"""What moving memory between KV cache and finetuning costs on this GPU.

    python -m benchmarks.memory [--seconds 20] [--quiet 60] [--burst 60]

A KV cache of Llama-3-8B's shape (32 layers, 8 heads of 128, bf16) lies on the arena. Beside a decode step that is a
captured graph reading all of the weights' bytes and the KV of 32 requests of 1,024 tokens, 64k tokens are mapped and
unmapped by the arena's thread, 2 GiB of state are swapped out and back, and a job's memory is taken back.

grow_64k_ms, shrink_64k_ms: wall time of one change off the step path, medians. decode_p50_ratio, decode_p99_ratio: the
step while memory moves over the step undisturbed. reclaim_ms: from the wish to 64k tokens mapped, with the job's
activations given up for it. swap_gib_s: of the slower way, out or back, at full rate; swap: both, and decode's p99
meanwhile. headroom: `benchmarks.headroom`, on a card of 40 GiB.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks import headroom, record
from core.memory.arena import Arena, open_arena, pages_of
from core.memory.rows import Rows
from core.memory.swap import Rate, Swappable, paced

LAYERS, HEADS, HEAD_DIM = 32, 8, 128
TOKEN_BYTES = HEADS * HEAD_DIM * 2
TOKENS = 64 * 1024
WEIGHTS_BYTES = 15 * 2**30
BATCH, CONTEXT = 32, 1024
GIB = 2**30


class Step:
    """A decode step's traffic as a graph: every weight is read once, and the KV of every request."""

    def __init__(self, rows: Rows) -> None:
        self._weights = torch.zeros(WEIGHTS_BYTES // 2 // 8, 8, dtype=torch.bfloat16, device="cuda")
        self._columns = [
            rows.tensor(column, (rows.tokens, HEADS * HEAD_DIM), torch.bfloat16) for column in range(2 * LAYERS)
        ]
        self._out = torch.zeros(8, dtype=torch.float32, device="cuda")
        self._run()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._run()

    def _run(self) -> None:
        self._out.copy_(self._weights.sum(0, dtype=torch.float32))
        for column in self._columns:
            self._out[0] += column[: BATCH * CONTEXT].sum(dtype=torch.float32)

    def times(self, go_on: Callable[[], bool]) -> list[float]:
        """ms of each step while `go_on()`, by events."""
        taken = []
        while go_on():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self._graph.replay()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end))
        return taken


def for_seconds(seconds: float) -> Callable[[], bool]:
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() < end


def beside(step: Step, work: Callable[[], None]) -> list[float]:
    """Step times while `work` runs in a thread."""
    thread = threading.Thread(target=work)
    thread.start()
    taken = step.times(thread.is_alive)
    thread.join()
    return taken


def timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def resizing(rows: Rows, small: int, large: int, seconds: float) -> tuple[Callable[[], None], list[float], list[float]]:
    grown: list[float] = []
    shrunk: list[float] = []

    def work() -> None:
        go_on = for_seconds(seconds)
        while go_on():
            shrunk.append(timed(lambda: rows.resize(small)))
            grown.append(timed(lambda: rows.resize(large)))

    return work, grown, shrunk


def swap(arena: Arena, step: Step) -> dict[str, float]:
    state = Swappable(arena, "job", [((2 * GIB // 4,), torch.float32)])
    paced(state.back(), Rate())
    state.tensors[0].normal_()
    torch.cuda.synchronize()
    seconds: dict[str, float] = {}

    def work() -> None:
        seconds["out"] = timed(lambda: paced(state.out(), Rate())) / 1e3
        seconds["back"] = timed(lambda: paced(state.back(), Rate())) / 1e3

    taken = beside(step, work)
    return {
        "out_gib_s": 2 / seconds["out"],
        "back_gib_s": 2 / seconds["back"],
        "decode_p99_ms": float(np.percentile(taken, 99)),
    }


def measure(seconds: float) -> dict[str, Any]:
    """All figures; the arena takes 24 GiB."""
    device = torch.device("cuda", 0)
    arena = open_arena(device, 24 * GIB)
    kept = BATCH * CONTEXT
    rows = Rows(arena, "kv cache", [TOKEN_BYTES] * (2 * LAYERS), kept + TOKENS)
    small, large = rows.rows_of(kept), rows.most
    rows.resize(large)
    step = Step(rows)
    undisturbed = step.times(for_seconds(seconds))
    work, grown, shrunk = resizing(rows, small, large, seconds)
    disturbed = beside(step, work)
    claim = arena.claim("job", 0)
    rows.resize(small)
    claim.resize(arena.statistics().capacity - arena.statistics().used)

    def reclaim() -> None:
        claim.resize(0)
        rows.resize(large)

    reclaimed = timed(reclaim)
    rows.resize(small)
    swapped = swap(arena, step)
    p50, p99 = (float(np.percentile(disturbed, q) / np.percentile(undisturbed, q)) for q in (50, 99))
    return {
        "tokens": TOKENS,
        "pages": pages_of(arena, TOKENS * TOKEN_BYTES) * 2 * LAYERS,
        "grow_64k_ms": median(grown),
        "shrink_64k_ms": median(shrunk),
        "decode_p50_ms": float(np.percentile(undisturbed, 50)),
        "decode_p50_ratio": p50,
        "decode_p99_ratio": p99,
        "reclaim_ms": reclaimed,
        "swap_gib_s": min(swapped["out_gib_s"], swapped["back_gib_s"]),
        "swap": swapped,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement of steps")
    parser.add_argument("--quiet", type=float, default=60.0, help="seconds of the job alone, for the head-room")
    parser.add_argument("--burst", type=float, default=60.0, help="seconds of requests beside it, at most")
    arguments = parser.parse_args()
    body = record.provenance("torch", "sglang") | {"gpu": torch.cuda.get_device_name()}
    rows = headroom.measure(arguments.quiet, arguments.burst)  # first: the engines want the GPU to themselves
    body |= measure(arguments.seconds) | {"headroom": rows}
    print(record.write("memory", body))


if __name__ == "__main__":
    main()
