# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"
"""The two products of LoRA in a captured decode graph: what each row's adapter adds to a linear layer's output.

A decode batch has few rows. SGLang's shrink (x A^T; csgmv, 0.5.16) has one block walk the whole input width, which
takes it longer than the layer's own product takes the whole device. Here the width is cut into parts, a block each,
that leave partial sums in fp32, [parts, S, N]; the expand adds them, always in the same order, where it reads them
anyway: no third kernel, no atomics, the same bits each time.

The shrink needs the layer's input, not its product, and the graph runs it beside the product, which at these sizes
waits for memory. The expand runs behind both, as the shrink does where a layer's product is not told (`product`): each
is launched while what is before it still ends (programmatic dependent launch), and reads what no kernel writes until
the results of that are to be seen.

Segments, ranks, slices and layouts are SGLang's (`LoRABatchInfo`; `chunked_sgmv_shrink.py`, `chunked_sgmv_expand.py`).
`shrink` and `expand` are hooks around SGLang's two functions, `product` is one around a linear layer's own product;
prefill, whose rows are many, stays with SGLang's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from core.serving.branches import beside, captured_so_far
from core.serving.lora_batch import SEGMENT

_ROWS = tl.constexpr(SEGMENT)
_WIDTH = 256  # columns of the input that a block multiplies at once
_STEPS, _PARTS = 2, 32  # such blocks in a part at least; parts of a sum at most
_TILE = 4096  # elements of B that a block of the expand holds
_WIDE = 8192  # columns of a slice from which on a block takes twice as many


@triton.jit
def _shrink(
    x, weights, partial, seg_indptr, weight_indices, lora_ranks, permutation, rows,
    N: tl.constexpr, K: tl.constexpr, SLICES: tl.constexpr, STEPS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    segment, part = tl.program_id(1), tl.program_id(2)
    start, end = tl.load(seg_indptr + segment), tl.load(seg_indptr + segment + 1)
    adapter = tl.load(weight_indices + segment)
    rank = tl.where(start < end, tl.load(lora_ranks + adapter), 0)
    s = start + tl.arange(0, _ROWS)
    in_s = s < end
    row = tl.load(permutation + s, mask=in_s, other=0)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    in_n = n < tl.minimum(N, rank * SLICES)
    k = part * (STEPS * BK) + tl.arange(0, BK)
    lefts = x + row[:, None] * K + k[None]
    rights = weights + adapter.to(tl.int64) * (N * K) + n[None] * K + k[:, None]
    right = tl.load(rights, mask=in_n[None] & (k < K)[:, None], other=0.0)
    if EARLY:
        # Every block waits, also one without work: what comes after this kernel counts on all that came before it.
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    if rank == 0:
        return
    left = tl.load(lefts, mask=in_s[:, None] & (k < K)[None], other=0.0)
    total = tl.zeros((_ROWS, BN), dtype=tl.float32)
    for step in tl.static_range(1, STEPS):
        in_k = k + step * BK < K
        next_left = tl.load(lefts + step * BK, mask=in_s[:, None] & in_k[None], other=0.0)
        next_right = tl.load(rights + step * BK, mask=in_n[None] & in_k[:, None], other=0.0)
        total += tl.dot(left, right)
        left, right = next_left, next_right
    total += tl.dot(left, right)
    tl.store(partial + (part * rows + row[:, None]) * N + n[None], total, mask=in_s[:, None] & in_n[None])


@triton.jit
def _expand(
    partial, weights, out, out_stride, seg_indptr, weight_indices, lora_ranks, permutation, scalings, offsets, rows,
    OUT: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, SLICES: tl.constexpr, PARTS: tl.constexpr, BN: tl.constexpr,
    ALIGNED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    part, segment = tl.program_id(1), tl.program_id(2)
    start, end = tl.load(seg_indptr + segment), tl.load(seg_indptr + segment + 1)
    adapter = tl.load(weight_indices + segment)
    rank = tl.where(start < end, tl.minimum(tl.load(lora_ranks + adapter), R), 0)
    first, last = tl.load(offsets + part), tl.load(offsets + part + 1)
    if ALIGNED:  # which the compiler cannot see, and needs for wide loads
        first, last = tl.multiple_of(first, 8), tl.multiple_of(last, 8)
    scaling = tl.load(scalings + adapter)
    n = first + tl.program_id(0) * BN + tl.arange(0, BN)
    in_n = n < last
    s = start + tl.arange(0, _ROWS)
    in_s = s < end
    row = tl.load(permutation + s, mask=in_s, other=0)
    r = tl.arange(0, RP)
    in_r = r < rank
    # The rank only afterwards: as a mask it would cut the loads into single elements.
    place = weights + adapter.to(tl.int64) * (OUT * R) + n[None] * R + r[:, None]
    right = tl.where(in_r[:, None], tl.load(place, mask=(r < R)[:, None] & in_n[None], other=0.0), 0.0)
    if EARLY:
        cuda.gdc_wait()
    if rank == 0:
        return
    sums = partial + row[:, None] * (SLICES * R) + part * rank + r[None]
    left = tl.zeros((_ROWS, RP), dtype=tl.float32)
    for one in tl.static_range(PARTS):
        left += tl.load(sums + one * rows * (SLICES * R), mask=in_s[:, None] & in_r[None], other=0.0)
    to = out + row[:, None] * out_stride + n[None]
    inside = in_s[:, None] & in_n[None]
    total = tl.dot(left.to(right.dtype), right) * scaling
    tl.store(to, (tl.load(to, mask=inside, other=0.0) + total).to(out.dtype.element_ty), mask=inside)


def parts_of(width: int, most: int = _PARTS) -> tuple[int, int]:
    """How a sum over so many columns is cut: into how many parts, `most` at most, and of how many blocks each."""
    blocks = triton.cdiv(width, _WIDTH)
    steps = max(_STEPS, triton.cdiv(blocks, most))
    return triton.cdiv(blocks, steps), steps


def partial_products(
    x: torch.Tensor, weights: torch.Tensor, info: Any, slices: int, most: int = _PARTS, early: bool | None = None
) -> torch.Tensor:
    """x [S, K] by each row's adapter's A, weights [L, N, K], N = slices x rank: partial sums fp32 [parts, S, N].

    Only the first slices x (the adapter's own rank) columns of a row are written, and none of a row without an adapter.
    early: launch it while the kernel before still runs; None: where the GPU can.
    """
    early = can_overlap(x.device.index) if early is None else early
    (rows, width), stacked = x.shape, weights.shape[1]
    parts, steps = parts_of(width, most)
    partial = torch.empty(parts, rows, stacked, dtype=torch.float32, device=x.device)
    block = min(64, max(16, triton.next_power_of_2(stacked)))
    _shrink[(triton.cdiv(stacked, block), len(info.weight_indices), parts)](
        x, weights, partial, info.seg_indptr, info.weight_indices, info.lora_ranks, info.permutation, rows,
        N=stacked, K=width, SLICES=slices, STEPS=steps, BN=block, BK=_WIDTH, EARLY=early, **_launch(early),
    )  # fmt: skip
    return partial


def add_products(
    partial: torch.Tensor, weights: torch.Tensor, info: Any, offsets: torch.Tensor, widest: int, out: torch.Tensor,
    early: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """Add the partial sums by B, weights [L, OUT, R], and the adapter's scaling to out [S, OUT], in place.

    offsets: where each slice of the output begins, and OUT: one slice, two alike, or one and two alike that follow it;
    widest: columns of the widest slice, the first.
    """
    early = can_overlap(partial.device.index) if early is None else early
    parts, rows, _ = partial.shape
    _, width, rank = weights.shape
    slices = len(offsets) - 1
    ranks = max(16, triton.next_power_of_2(rank))
    block = max(16, min(256 if widest >= _WIDE else 128, _TILE // ranks))
    _expand[(triton.cdiv(widest, block), slices, len(info.weight_indices))](
        partial, weights, out, out.stride(0), info.seg_indptr, info.weight_indices, info.lora_ranks, info.permutation,
        info.scalings, offsets, rows,
        OUT=width, R=rank, RP=ranks, SLICES=slices, PARTS=parts, BN=block,
        ALIGNED=width % 16 == 0 == widest % 16, EARLY=early, **_launch(early),
    )  # fmt: skip
    return out


@cache
def can_overlap(device: int) -> bool:
    """Programmatic dependent launch came with Hopper."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


def _launch(early: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if early else {}


# ---- hooks -----------------------------------------------------------------------------------------------------------

_MODULE = "sglang.srt.lora.backend.chunked_backend"
SHRINK, EXPAND = f"{_MODULE}.chunked_sgmv_lora_shrink_forward", f"{_MODULE}.chunked_sgmv_lora_expand_forward"
PRODUCT = "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply"


class _Last:
    """The product that was captured last: its input, and what in the graph it runs after."""

    given: weakref.ref[torch.Tensor] | None = None
    after: Sequence[Any] | None = None

    @classmethod
    def take(cls, x: torch.Tensor) -> Sequence[Any] | None:
        """Once, what the product of x runs after; None when it is not the last one, or was not captured."""
        given, cls.given = cls.given, None
        return cls.after if given is not None and given() is x else None


def product(
    original: Callable[..., torch.Tensor], method: Any, layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Around SGLang's product of a linear layer: tells `shrink` what it can run beside."""
    if not torch.compiler.is_compiling():  # prefill without adapters may be
        _Last.given, _Last.after = weakref.ref(x), captured_so_far()
    return original(method, layer, x, *args, **kwargs)


def shrink(
    original: Callable[..., torch.Tensor], x: torch.Tensor, weights: torch.Tensor, batch_info: Any, num_slices: int
) -> torch.Tensor:
    """Around SGLang's: partial sums where the batch is a graph's, which `expand` tells by their dimensions."""
    if not batch_info.use_cuda_graph or batch_info.max_len != SEGMENT:
        return original(x=x, weights=weights, batch_info=batch_info, num_slices=num_slices)
    after = _Last.take(x)
    if after is None:
        return partial_products(x, weights, batch_info, num_slices)
    with beside(after):
        return partial_products(x, weights, batch_info, num_slices, early=False)


def expand(
    original: Callable[..., torch.Tensor], x: torch.Tensor, weights: torch.Tensor, batch_info: Any,
    slice_offsets: torch.Tensor, max_slice_size: int, base_output: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Around SGLang's: what `shrink` left goes on with the kernel that fits it."""
    if x.dim() == 2:
        return original(
            x=x, weights=weights, batch_info=batch_info, slice_offsets=slice_offsets, max_slice_size=max_slice_size,
            base_output=base_output,
        )  # fmt: skip
    if base_output is None:
        base_output = torch.zeros(x.shape[1], weights.shape[1], dtype=weights.dtype, device=x.device)
    return add_products(x, weights, batch_info, slice_offsets, max_slice_size, base_output)
