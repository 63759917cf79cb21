"""What serving with an adapter adds to a decode step: the LoRA kernels at the shapes of one model.

    python -m benchmarks.lora_kernels [--model llama-3-8b] [--batches 32 128] [--configs DIR]

Each of a layer's four pairs of kernels runs behind the layer's own product, once per layer, on weights of its own, in a
CUDA graph, as in decode; what the products take alone is subtracted. sglang: SGLang's csgmv kernels with its grid (a
block for each request of the largest batch, `most`); bounded: with that of core/serving/lora_batch.py; shrink, expand:
there with other block sizes. beside, behind, in_turn: core/serving/lora_kernels.py, the first kernel beside the layer's
product, as it is used; behind it, launched early; and each when the one before has ended. dense: the same two products
by cuBLAS, which knows one adapter only; a bound of a kind. us: of one pair; error: of what ours add, relative to
SGLang's. ms_per_step: of all pairs of all layers; tuned: SGLang's with the bounded grid and its best blocks.

With --configs the best blocks of SGLang's are written there as its own tuning does; an engine that is started with
SGLANG_LORA_CONFIG_DIR=DIR uses them.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import record
from benchmarks.frontier import MODELS
from core.serving import lora_kernels
from core.serving.branches import beside, captured_so_far
from core.serving.lora_batch import most_segments

RANK, ADAPTERS = 16, 2
SHRINK = [{"BLOCK_N": 16, "BLOCK_K": k, "num_warps": w, "num_stages": s} for k, w, s in
          ((256, 4, 5), (512, 4, 3), (1024, 8, 2))]  # fmt: skip
EXPAND = [{"BLOCK_N": n, "BLOCK_K": 16, "num_warps": w} for n, w in ((64, 2), (128, 4))]
OURS = ("beside", "behind", "in_turn")


class Pair(NamedTuple):
    """One LoRA of a layer: its input, and the rows of each product that it adds to."""

    name: str
    inputs: int
    outputs: tuple[int, ...]


def pairs(shape: dict[str, Any]) -> list[Pair]:
    """The four of a layer, as SGLang stacks them."""
    hidden, width = shape["hidden_size"], shape["intermediate_size"]
    head = shape.get("head_dim") or hidden // shape["num_attention_heads"]
    q, kv = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    return [
        Pair("qkv", hidden, (q, kv, kv)), Pair("o", q, (hidden,)), Pair("gate_up", hidden, (width, width)),
        Pair("down", width, (hidden,)),
    ]  # fmt: skip


class Data:
    """Inputs and weights of a pair, one set a layer."""

    def __init__(self, pair: Pair, layers: int, batch: int) -> None:
        slices, rows = len(pair.outputs), sum(pair.outputs)
        self.pair, self.batch = pair, batch
        self.x = torch.randn(batch, pair.inputs, device="cuda", dtype=torch.bfloat16)
        self.out = torch.zeros(batch, rows, device="cuda", dtype=torch.bfloat16)
        product = torch.randn(rows, pair.inputs, device="cuda", dtype=torch.bfloat16) * 0.01
        self.products = [product.clone() for _ in range(layers)]
        self.weights = [
            (torch.randn(ADAPTERS, slices * RANK, pair.inputs, device="cuda", dtype=torch.bfloat16) * 0.01,
             torch.randn(ADAPTERS, rows, RANK, device="cuda", dtype=torch.bfloat16) * 0.01)
            for _ in range(layers)
        ]  # fmt: skip
        ends = itertools.accumulate(pair.outputs, initial=0)
        self.offsets = torch.tensor(list(ends), device="cuda", dtype=torch.int32)

    def info(self, grid: int) -> Any:
        """All requests served with the second adapter, in a graph with room for `grid` segments."""
        from sglang.srt.lora.utils import LoRABatchInfo

        ends = [min(16 * n, self.batch) for n in range(grid + 1)]
        ints: dict[str, Any] = {"device": "cuda", "dtype": torch.int32}
        return LoRABatchInfo(
            use_cuda_graph=True, bs=self.batch, num_segments=-(-self.batch // 16), max_len=16, seg_lens=None,
            seg_indptr=torch.tensor(ends, **ints), weight_indices=torch.ones(grid, **ints),
            lora_ranks=torch.tensor([0, RANK], **ints), scalings=torch.ones(ADAPTERS, device="cuda"),
            permutation=torch.arange(self.batch, **ints),
        )  # fmt: skip

    def product(self, layer: int) -> torch.Tensor:
        """The layer's own, to which the pair adds."""
        return torch.mm(self.x, self.products[layer].t(), out=self.out)

    def alone(self) -> None:
        """The products, and no pair."""
        for layer in range(len(self.weights)):
            self.product(layer)

    def dense(self) -> None:
        """The same by cuBLAS, as if the slices were one."""
        for layer, (a, b) in enumerate(self.weights):
            self.product(layer)
            left = torch.mm(self.x, a[1].t())[:, :RANK]
            torch.addmm(self.out, left, b[1].t(), out=self.out)


class Kernels:
    """SGLang's two kernels with the blocks that are asked for."""

    def __init__(self) -> None:
        from sglang.kernels.ops.gemm import chunked_sgmv_expand, chunked_sgmv_shrink

        self._shrink, self._expand = chunked_sgmv_shrink, chunked_sgmv_expand

    def use(self, shrink: dict[str, int] | None, expand: dict[str, int] | None) -> None:
        """None: what SGLang has."""
        from sglang.kernels.ops.gemm import lora_tuning_config as tuned

        own = tuned.get_lora_shrink_config, tuned.get_lora_expand_config
        self._shrink.get_lora_shrink_config = own[0] if shrink is None else lambda **_: shrink
        self._expand.get_lora_expand_config = own[1] if expand is None else lambda **_: expand
        for kernel in (self._shrink._chunked_lora_shrink_kernel, self._expand._chunked_lora_expand_kernel):
            if hasattr(kernel, "kernel_cache"):  # whose key leaves the blocks out
                kernel.kernel_cache.clear()

    def run(self, data: Data, info: Any) -> None:
        """Every layer's pair."""
        outputs = data.pair.outputs
        for layer, (a, b) in enumerate(data.weights):
            data.product(layer)
            left = self._shrink.chunked_sgmv_lora_shrink_forward(data.x, a, info, len(outputs))
            self._expand.chunked_sgmv_lora_expand_forward(left, b, info, data.offsets, max(outputs), data.out)


def run_ours(data: Data, info: Any, way: str) -> None:
    """Every layer's pair by our kernels."""
    outputs, early = data.pair.outputs, way != "in_turn"
    for layer, (a, b) in enumerate(data.weights):
        before = captured_so_far()
        data.product(layer)
        if way == "beside" and before is not None:
            with beside(before):
                partial = lora_kernels.partial_products(data.x, a, info, len(outputs), early=False)
        else:
            partial = lora_kernels.partial_products(data.x, a, info, len(outputs), early=early)
        lora_kernels.add_products(partial, b, info, data.offsets, max(outputs), data.out, early=early)


def error(kernels: Kernels, data: Data, info: Any, run: Callable[[], None]) -> float:
    """Of what `run` adds in the first layer, relative to what SGLang's kernels add."""
    everything, data.weights = data.weights, data.weights[:1]
    found = []
    for way in (data.alone, lambda: kernels.run(data, info), run):
        way()
        found.append(data.out.float())
    data.weights = everything
    return round(float((found[2] - found[1]).norm() / (found[1] - found[0]).norm()), 5)


def layer_us(run: Callable[[], None], layers: int) -> float:
    """Of one layer, in a graph of all; the median of ten replays."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            run()
        times = []
        for _ in range(12):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    return sorted(times[2:])[5] * 1e3 / layers


def measured(kernels: Kernels, data: Data, layers: int, most: int) -> Iterator[dict[str, Any]]:
    """A row for each way to run a pair."""
    narrow = most_segments(data.batch, ADAPTERS)
    alone = layer_us(data.alone, layers)
    kernels.use(None, None)

    def row(what: str, run: Callable[[], None], **how: Any) -> dict[str, Any]:
        found = {"pair": data.pair.name, "batch": data.batch, "what": what} | how
        try:
            return found | {"us": round(layer_us(run, layers) - alone, 2)}
        except Exception as refused:  # blocks that do not fit into shared memory
            return found | {"us": None, "refused": f"{type(refused).__name__}: {refused}"[:120]}

    wide, bounded = data.info(most), data.info(narrow)
    yield {"pair": data.pair.name, "batch": data.batch, "what": "product", "us": round(alone, 2)}
    yield row("dense", data.dense)
    yield row("sglang", lambda: kernels.run(data, wide), grid=most)
    yield row("bounded", lambda: kernels.run(data, bounded), grid=narrow)
    for way in OURS:

        def run(way: str = way) -> None:
            run_ours(data, bounded, way)

        found = row(way, run, grid=narrow)
        yield found if found["us"] is None else found | {"error": error(kernels, data, bounded, run)}
    for name, choices in (("shrink", SHRINK), ("expand", EXPAND)):
        for chosen in choices:
            kernels.use(*((chosen, None) if name == "shrink" else (None, chosen)))
            yield row(name, lambda: kernels.run(data, bounded), grid=narrow, **{name: chosen})


def best(rows: list[dict[str, Any]], pair: str, batch: int, what: str) -> dict[str, Any] | None:
    """The fastest of a pair's rows of a kind."""
    ran = [r for r in rows if (r["pair"], r["batch"], r["what"]) == (pair, batch, what) and r["us"] is not None]
    return min(ran, key=lambda r: float(r["us"]), default=None)


def per_step(rows: list[dict[str, Any]], shape: dict[str, Any], batch: int) -> dict[str, float]:
    """ms of all pairs of all layers."""
    total = dict.fromkeys(("product", "dense", "sglang", "bounded", "tuned", *OURS), 0.0)
    for pair in pairs(shape):
        us = {what: (best(rows, pair.name, batch, what) or {"us": float("nan")})["us"] for what in
              ("product", "dense", "sglang", "bounded", "shrink", "expand", *OURS)}  # fmt: skip
        us["tuned"] = us["bounded"] - max(0.0, us["bounded"] - us["shrink"]) - max(0.0, us["bounded"] - us["expand"])
        for what in total:
            total[what] += us[what] * shape["num_hidden_layers"] / 1e3
    return {what: round(ms, 3) for what, ms in total.items()}


def write_configs(folder: Path, rows: list[dict[str, Any]], shape: dict[str, Any], batch: int) -> None:
    """The best blocks of each kernel as files of SGLang's tuning."""
    import triton
    from sglang.kernels.ops.gemm.lora_tuning_config import get_lora_config_file_name

    place = folder / "csgmv_configs" / f"triton_{triton.__version__.replace('.', '_')}"
    place.mkdir(parents=True, exist_ok=True)
    for pair in pairs(shape):
        slices = len(pair.outputs)
        for kernel, size in (("shrink", pair.inputs), ("expand", sum(pair.outputs))):
            found = best(rows, pair.name, batch, kernel)
            if found is not None:
                name = get_lora_config_file_name(kernel, size, RANK, slices)
                (place / name).write_text(json.dumps({"16": found[kernel]}))


def main() -> None:
    """Measure, write results/lora_kernels.json, print a step's sums."""
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--model", choices=MODELS, default="llama-3-8b")
    arguments.add_argument("--batches", type=int, nargs="+", default=[32, 128])
    arguments.add_argument("--most", type=int, default=128, help="requests of the largest batch that has a graph")
    arguments.add_argument("--configs", type=Path, help="folder for SGLang's tuning files")
    options = arguments.parse_args()
    shape, kernels = MODELS[options.model], Kernels()
    rows: list[dict[str, Any]] = []
    for batch in options.batches:
        for pair in pairs(shape):
            data = Data(pair, shape["num_hidden_layers"], batch)
            for row in measured(kernels, data, shape["num_hidden_layers"], options.most):
                rows.append(row)
                print(row, flush=True)
    steps = {batch: per_step(rows, shape, batch) for batch in options.batches}
    if options.configs is not None:
        write_configs(options.configs, rows, shape, options.batches[0])
    body = record.provenance("sglang", "torch", "triton") | {"gpu": torch.cuda.get_device_name()}
    print(record.write("lora_kernels", body | {"model": options.model, "ms_per_step": steps, "rows": rows}))
    print(json.dumps(steps))


if __name__ == "__main__":
    main()
