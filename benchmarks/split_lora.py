"""A candidate for serving with adapters: SGLang's pair of LoRA kernels with the long sum of the first one split.

A decode batch has few rows, so SGLang's shrink runs on as many SMs as there are adapters and walks the whole input
width in one block. Here `split` blocks walk a part each and leave partial sums in fp32, [split, S, N]; the expand adds
them, always in the same order, where it reads them anyway. No third kernel, no atomics. Segments, ranks and layouts are
SGLang's (`chunked_sgmv_shrink.py`, `chunked_sgmv_expand.py` of 0.5.16). benchmarks/lora_kernels.py measures it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_SEGMENT = tl.constexpr(16)  # tokens of a segment at most
BLOCK_K = 128


@triton.jit
def _shrink(
    x, weights, partial, seg_indptr, weight_indices, lora_ranks, permutation, rows,
    N: tl.constexpr, K: tl.constexpr, SLICES: tl.constexpr, SPLIT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    segment, part = tl.program_id(1), tl.program_id(2)
    start, end = tl.load(seg_indptr + segment), tl.load(seg_indptr + segment + 1)
    adapter = tl.load(weight_indices + segment)
    rank = tl.load(lora_ranks + adapter)
    if (start == end) | (rank == 0):
        return
    s = start + tl.arange(0, _SEGMENT)
    in_s = s < end
    row = tl.load(permutation + s, mask=in_s, other=0)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    in_n = n < tl.minimum(N, rank * SLICES)
    k = part * (K // SPLIT) + tl.arange(0, BK)
    left = x + row[:, None] * K + k[None]
    right = weights + adapter.to(tl.int64) * (N * K) + n[None] * K + k[:, None]
    total = tl.zeros((_SEGMENT, BN), dtype=tl.float32)
    for _ in range(K // SPLIT // BK):
        total += tl.dot(
            tl.load(left, mask=in_s[:, None], other=0.0), tl.load(right, mask=in_n[None], other=0.0),
        )  # fmt: skip
        left += BK
        right += BK
    tl.store(partial + (part * rows + row[:, None]) * N + n[None], total, mask=in_s[:, None] & in_n[None])


@triton.jit
def _expand(
    partial, weights, out, out_stride, seg_indptr, weight_indices, lora_ranks, permutation, scalings, offsets, rows,
    OUT: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, SLICES: tl.constexpr, SPLIT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    part, segment = tl.program_id(1), tl.program_id(2)
    start, end = tl.load(seg_indptr + segment), tl.load(seg_indptr + segment + 1)
    adapter = tl.load(weight_indices + segment)
    rank = tl.minimum(tl.load(lora_ranks + adapter), R)
    first, last = tl.load(offsets + part), tl.load(offsets + part + 1)
    if (start == end) | (rank == 0):
        return
    n = first + tl.program_id(0) * BN + tl.arange(0, BN)
    in_n = n < last
    s = start + tl.arange(0, _SEGMENT)
    in_s = s < end
    row = tl.load(permutation + s, mask=in_s, other=0)
    r = tl.arange(0, RP)
    in_r = r < rank
    place = partial + row[:, None] * (SLICES * R) + part * rank + r[None]
    left = tl.zeros((_SEGMENT, RP), dtype=tl.float32)
    for one in tl.static_range(SPLIT):
        left += tl.load(place + one * rows * (SLICES * R), mask=in_s[:, None] & in_r[None], other=0.0)
    right = tl.load(
        weights + adapter.to(tl.int64) * (OUT * R) + n[None] * R + r[:, None],
        mask=in_r[:, None] & in_n[None],
        other=0.0,
    )
    total = tl.dot(left.to(right.dtype), right) * tl.load(scalings + adapter)
    to = out + row[:, None] * out_stride + n[None]
    inside = in_s[:, None] & in_n[None]
    tl.store(to, (tl.load(to, mask=inside, other=0.0) + total).to(out.dtype.element_ty), mask=inside)


def splits(width: int, most: int) -> int:
    """Into how many parts a sum over so many columns is cut, `most` at most: equal ones, of whole blocks."""
    blocks, rest = divmod(width, BLOCK_K)
    if rest:
        raise ValueError(f"an input width of {width} is no multiple of {BLOCK_K}; use SGLang's own kernels")
    return max(parts for parts in range(1, most + 1) if blocks % parts == 0)


def shrink(x: torch.Tensor, weights: torch.Tensor, info: Any, slices: int, split: int) -> torch.Tensor:
    """x [S, K] by each row's adapter's A, weights [L, N, K], N = slices x rank: partial sums fp32 [split, S, N]."""
    (rows, width), stacked = x.shape, weights.shape[1]
    partial = torch.empty(split, rows, stacked, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(stacked, 16), len(info.weight_indices), split)
    _shrink[grid](
        x, weights, partial, info.seg_indptr, info.weight_indices, info.lora_ranks, info.permutation, rows,
        N=stacked, K=width, SLICES=slices, SPLIT=split, BN=16, BK=BLOCK_K,
    )  # fmt: skip
    return partial


def expand(
    partial: torch.Tensor, weights: torch.Tensor, info: Any, offsets: torch.Tensor, widest: int, out: torch.Tensor,
    block: int = 64,
) -> torch.Tensor:  # fmt: skip
    """Add the partial sums by B, weights [L, OUT, R], and the adapter's scaling to out [S, OUT]; offsets: where each
    slice begins, and OUT; widest: of the slices."""
    split, rows, _ = partial.shape
    _, width, rank = weights.shape
    slices = len(offsets) - 1
    _expand[(triton.cdiv(widest, block), slices, len(info.weight_indices))](
        partial, weights, out, out.stride(0), info.seg_indptr, info.weight_indices, info.lora_ranks, info.permutation,
        info.scalings, offsets, rows,
        OUT=width, R=rank, RP=max(16, triton.next_power_of_2(rank)), SLICES=slices, SPLIT=split, BN=block,
    )  # fmt: skip
    return out
