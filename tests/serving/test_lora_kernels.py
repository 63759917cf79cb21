"""The LoRA kernels of captured decode compute what the adapters' matrices say; on a CPU by Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
fact = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="runs in a process with Triton's interpreter")
overlaps = pytest.mark.skipif(
    DEVICE == "cpu" or torch.cuda.get_device_capability() < (9, 0), reason="needs a GPU that launches kernels early"
)
RANK = 8


@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="the facts below run here")
def test_the_facts_below_under_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--noconftest", "-x", "-p", "no:cacheprovider", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def info_of(adapters: list[int], ranks: list[int], room: int) -> Any:
    """The segments of requests served with these adapters, as SGLang cuts them, and room for some more."""
    order = sorted(range(len(adapters)), key=lambda n: adapters[n])
    starts, owners = [0], list[int]()
    for adapter in sorted(set(adapters)):
        left = adapters.count(adapter)
        while left:
            owners.append(adapter)
            starts.append(starts[-1] + min(16, left))
            left -= min(16, left)
    starts += [starts[-1]] * (room - len(owners))
    owners += [0] * (room - len(owners))

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    return SimpleNamespace(
        seg_indptr=ints(starts), weight_indices=ints(owners), lora_ranks=ints(ranks), permutation=ints(order),
        scalings=torch.tensor([0.0, 2.0, 0.5], device=DEVICE),
    )  # fmt: skip


@fact
@pytest.mark.parametrize("slices", [(40,), (48, 16, 16)])
@pytest.mark.parametrize(("width", "most"), [(256, 16), (1024, 16), (1408, 2), (64, 16), (1280, 32)])
@pytest.mark.parametrize("early", [False, pytest.param(True, marks=(pytest.mark.gpu, overlaps))])
def test_each_row_gets_what_its_adapter_adds(slices: tuple[int, ...], width: int, most: int, early: bool) -> None:
    from core.serving import lora_kernels

    generator = torch.Generator().manual_seed(0)

    def rand(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(DEVICE)

    adapters = [1] * 19 + [0, 2, 2] + [1] * 3  # more than a segment of one, none of its own for some
    ranks = [0, RANK, RANK // 2]
    x, out = rand(len(adapters), width), rand(len(adapters), sum(slices))
    a, b = rand(3, len(slices) * RANK, width) / 20, rand(3, sum(slices), RANK)
    offsets = torch.tensor([0, *torch.tensor(slices).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    info = info_of(adapters, ranks, room=6)
    expected = out.clone()
    for row, adapter in enumerate(adapters):
        rank = ranks[adapter]
        for number in range(len(slices)):
            part = slice(int(offsets[number]), int(offsets[number + 1]))
            low = a[adapter, number * rank : (number + 1) * rank] @ x[row]
            expected[row, part] += info.scalings[adapter] * (b[adapter, part, :rank] @ low)
    partial = lora_kernels.partial_products(x, a, info, len(slices), most, early=early)
    lora_kernels.add_products(partial, b, info, offsets, max(slices), out, early=early)
    rtol, atol = (1e-4, 1e-3) if DEVICE == "cpu" else (1e-2, 1e-2)  # a GPU multiplies fp32 as tf32
    torch.testing.assert_close(out, expected, rtol=rtol, atol=atol)


def layers_of(width: int, rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Of twelve layers on the GPU: the layer's own matrix [width, width], and A and B of two adapters."""
    torch.manual_seed(0)
    sizes = ((width, width), 64), ((2, rank, width), 64), ((2, width, rank), 4)
    base, a, b = (
        [torch.randn(size, device="cuda", dtype=torch.bfloat16) / part for _ in range(12)] for size, part in sizes
    )
    return base, a, b


@pytest.mark.gpu
@overlaps
def test_in_a_graph_each_kernel_sees_what_those_before_it_wrote() -> None:
    """Launched early, after products that take longer than they do, and over memory that is used again."""
    from core.serving import lora_kernels

    rows, width, rank = 24, 4096, 16
    base, a, b = layers_of(width, rank)
    info = info_of([1] * rows, [0, rank], room=3)
    offsets = torch.tensor([0, width], dtype=torch.int32, device="cuda")
    given = torch.empty(rows, width, device="cuda", dtype=torch.bfloat16)

    def through(early: bool) -> torch.Tensor:
        x = given
        for n in range(len(base)):
            out = x @ base[n]
            partial = lora_kernels.partial_products(x, a[n], info, 1, early=early)
            x = lora_kernels.add_products(partial, b[n], info, offsets, width, out, early=early)
            x = x / x.float().square().mean(1, keepdim=True).sqrt().bfloat16()
        return x

    through(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = through(True)
    for _ in range(20):
        given.normal_()
        graph.replay()
        torch.testing.assert_close(found, through(False), rtol=0, atol=0)


@pytest.mark.gpu
@overlaps
def test_beside_the_layers_product_the_hooks_compute_the_same() -> None:
    """As SGLang's layers call them in a capture, a product, then the pair; eagerly nothing runs beside."""
    pytest.importorskip("cuda.bindings")
    from core.serving import lora_kernels

    width, rank = 4096, 16
    base, a, b = layers_of(width, rank)
    offsets = torch.tensor([0, width], dtype=torch.int32, device="cuda")

    def sglangs(*_: Any, **__: Any) -> torch.Tensor:
        raise AssertionError("a captured decode batch is ours")

    def through(x: torch.Tensor) -> torch.Tensor:
        for n in range(len(base)):
            product = lora_kernels.product(lambda _, weight, x: x @ weight, None, base[n], x)
            partial = lora_kernels.shrink(sglangs, x, a[n], info, 1)
            x = lora_kernels.expand(sglangs, partial, b[n], info, offsets, width, product)
            x = x / x.float().square().mean(1, keepdim=True).sqrt().bfloat16()
        return x

    for rows in (24, 80):
        info = info_of([1] * rows, [0, rank], room=rows // 16 + 2)
        info.use_cuda_graph, info.max_len = True, 16
        given = torch.empty(rows, width, device="cuda", dtype=torch.bfloat16)
        through(given.normal_())
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = through(given)
        for _ in range(20):
            given.normal_()
            graph.replay()
            torch.testing.assert_close(found, through(given), rtol=0, atol=0)


@fact
def test_a_sum_is_cut_into_parts_of_whole_blocks_that_cover_it() -> None:
    from core.serving.lora_kernels import parts_of

    assert [parts_of(width) for width in (4096, 14336, 3584, 18944)] == [(8, 2), (28, 2), (7, 2), (25, 3)]
    for width in range(64, 20000, 64):
        parts, steps = parts_of(width)
        assert (parts - 1) * steps * 256 < width <= parts * steps * 256
