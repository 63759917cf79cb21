# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"
"""The fused layer's small operations as Triton kernels: the functions of `core.finetune.kernels_torch`, on a GPU.

What a LoRA pair adds to a product [M, N] is a product over its rank alone, so it is computed where the product is read
anyway, and costs no pass over memory. Every result is summed in a fixed order: a tasklet gives the same bits on every
partition. Nothing depends on how many rows a micro-batch packs, so one captured graph serves them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch
import triton
import triton.language as tl

from core.finetune.kernels_torch import BETA1, BETA2, EPS, IGNORED

_LOG2E = tl.constexpr(1.4426950408889634)
_SHARED_BYTES = 190 * 1024


def _rank_block(rank: int) -> int:
    """A matrix unit's smallest tile is 16 wide."""
    return max(16, 1 << (rank - 1).bit_length())


def _depth(stage_elements: int, dtype: torch.dtype) -> int:
    """How many steps of a loop may be loaded ahead: a Hopper block has 227 KiB of shared memory."""
    return min(6, _SHARED_BYTES // (stage_elements * dtype.itemsize))


@triton.jit
def _lora(xa, stride, first, b, m, n, in_m, in_n, R: tl.constexpr, RP: tl.constexpr):
    """fp32 [m, n] tile of xa[:, first : first + R] @ b [N, R] transposed."""
    r = tl.arange(0, RP)
    left = tl.load(xa + m[:, None] * stride + first + r[None], mask=in_m[:, None] & (r < R)[None], other=0.0)
    right = tl.load(b + n[None] * R + r[:, None], mask=in_n[None] & (r < R)[:, None], other=0.0)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def _lora_back(t, a, stride, m, n, in_m, in_n, R: tl.constexpr, RP: tl.constexpr):
    """fp32 [m, n] tile of t [M, R] @ a [R, N]."""
    r = tl.arange(0, RP)
    left = tl.load(t + m[:, None] * R + r[None], mask=in_m[:, None] & (r < R)[None], other=0.0)
    right = tl.load(a + r[:, None] * stride + n[None], mask=in_n[None] & (r < R)[:, None], other=0.0)
    return tl.dot(left, right, input_precision="ieee")


# ---- norms -----------------------------------------------------------------------------------------------------------


@triton.jit
def _rms_norm(x, weight, out, rstd, eps, H: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    h = tl.arange(0, BLOCK)
    inside = h < H
    value = tl.load(x + row * H + h, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / H + eps)
    tl.store(rstd + row, scale)
    value *= scale * tl.load(weight + h, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * H + h, value.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, rstd: torch.Tensor) -> None:
    """See `kernels_torch.rms_norm`."""
    rows, width = x.shape
    _rms_norm[(rows,)](x, weight, out, rstd, eps, H=width, BLOCK=triton.next_power_of_2(width), num_warps=8)


@triton.jit
def _add_lora_back(
    gradient, t, a, M, N,
    R: tl.constexpr, RP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    in_m, in_n = m < M, n < N
    inside = in_m[:, None] & in_n[None]
    at = gradient + m[:, None] * N + n[None]
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    value += _lora_back(t, a, N, m, n, in_m, in_n, R, RP)
    tl.store(at, value.to(gradient.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm_backward(
    gradient, x, weight, rstd, residual, out, normed,
    H: tl.constexpr, RESIDUAL: tl.constexpr, NORMED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    h = tl.arange(0, BLOCK)
    inside = h < H
    at = row * H + h
    scale = tl.load(rstd + row)
    w = tl.load(weight + h, mask=inside, other=0.0).to(tl.float32)
    scaled = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale
    inner = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) * w
    value = scale * (inner - scaled * (tl.sum(inner * scaled) / H))
    if RESIDUAL:
        value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)
    if NORMED:
        tl.store(normed + at, (scaled * w).to(normed.dtype.element_ty), mask=inside)


def rms_norm_backward(
    gradient: torch.Tensor,
    lora: tuple[torch.Tensor, torch.Tensor] | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    normed: torch.Tensor | None,
) -> None:
    """See `kernels_torch.rms_norm_backward`."""
    rows, width = x.shape
    if lora is not None:
        t, a = lora
        rank = t.shape[1]
        _add_lora_back[(triton.cdiv(width, 128), triton.cdiv(rows, 64))](
            gradient, t, a, rows, width, R=rank, RP=_rank_block(rank), BM=64, BN=128, num_warps=4
        )
    _rms_norm_backward[(rows,)](
        gradient, x, weight, rstd,
        residual if residual is not None else gradient,
        out,
        normed if normed is not None else gradient,
        H=width, RESIDUAL=residual is not None, NORMED=normed is not None,
        BLOCK=triton.next_power_of_2(width), num_warps=8,
    )  # fmt: skip


# ---- LoRA's own products ---------------------------------------------------------------------------------------------


@triton.jit
def _project(
    x, w, out, M, end0, end1, end2, K, stride_k, stride_r, stride_out,
    R: tl.constexpr, RP: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    section = tl.program_id(1)
    begin = tl.where(section == 0, 0, tl.where(section == 1, end0, end1))
    end = tl.where(section == 0, end0, tl.where(section == 1, end1, end2))
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    r = tl.arange(0, RP)
    in_m, in_r = m < M, r < R
    total = tl.zeros([BM, RP], tl.float32)
    for first in range(begin, end, BK):
        k = first + tl.arange(0, BK)
        left = tl.load(x + m[:, None] * K + k[None], mask=in_m[:, None] & (k < end)[None], other=0.0)
        right = tl.load(w + k[:, None] * stride_k + r[None] * stride_r, mask=(k < end)[:, None] & in_r[None], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    at = m[:, None] * stride_out + section * R + r[None]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=in_m[:, None] & in_r[None])


def _project_launch(
    x: torch.Tensor, w: torch.Tensor, sections: Sequence[int], out: torch.Tensor, rank: int, strides: tuple[int, int]
) -> None:
    rows, width = x.shape
    columns = _rank_block(rank)
    step = 256
    while _depth((16 + columns) * step, x.dtype) < 2:
        step //= 2
    ends = [sum(sections[: n + 1]) for n in range(3)]
    _project[(triton.cdiv(rows, 16), len(sections))](
        x, w, out, rows, *ends, width, *strides, out.shape[1],
        R=rank, RP=columns, BM=16, BK=step, num_warps=4, num_stages=_depth((16 + columns) * step, x.dtype),
    )  # fmt: skip


def project(x: torch.Tensor, a: torch.Tensor, out: torch.Tensor) -> None:
    """See `kernels_torch.project`."""
    _project_launch(x, a, (x.shape[1],), out, out.shape[1], (1, x.shape[1]))


def project_sections(x: torch.Tensor, b: torch.Tensor, sections: Sequence[int], out: torch.Tensor) -> None:
    """See `kernels_torch.project_sections`."""
    _project_launch(x, b, sections, out, b.shape[1], (b.shape[1], 1))


@triton.jit
def _accumulate(
    x, t, gradient, M, N, end0, end1, stride_t, stride_n, stride_r,
    R: tl.constexpr, RP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0) * BN
    section = (begin >= end0).to(tl.int32) + (begin >= end1).to(tl.int32)
    n = begin + tl.arange(0, BN)
    r = tl.arange(0, RP)
    in_n, in_r = n < N, r < R
    total = tl.zeros([BN, RP], tl.float32)
    for first in range(0, M, BM):
        m = first + tl.arange(0, BM)
        left = tl.load(x + m[:, None] * N + n[None], mask=(m < M)[:, None] & in_n[None], other=0.0)
        right = tl.load(
            t + m[:, None] * stride_t + section * R + r[None], mask=(m < M)[:, None] & in_r[None], other=0.0
        )
        total = tl.dot(tl.trans(left), right, total, input_precision="ieee")
    at = gradient + n[:, None] * stride_n + r[None] * stride_r
    inside = in_n[:, None] & in_r[None]
    tl.store(at, tl.load(at, mask=inside, other=0.0) + total, mask=inside)


def _accumulate_launch(
    x: torch.Tensor,
    t: torch.Tensor,
    sections: Sequence[int],
    gradient: torch.Tensor,
    rank: int,
    strides: tuple[int, int],
) -> None:
    rows, width = x.shape
    block = min(64, gcd(*sections) & -gcd(*sections))  # a block lies in one section
    ends = [sum(sections[: n + 1]) for n in range(2)]
    columns = _rank_block(rank)
    _accumulate[(triton.cdiv(width, block),)](
        x, t, gradient, rows, width, *ends, t.shape[1], *strides,
        R=rank, RP=columns, BM=64, BN=block, num_warps=4 if columns <= 128 else 8,
        num_stages=_depth((block + columns) * 64, x.dtype),
    )  # fmt: skip


def accumulate_a(t: torch.Tensor, x: torch.Tensor, gradient: torch.Tensor) -> None:
    """See `kernels_torch.accumulate_a`."""
    _accumulate_launch(x, t, (x.shape[1],), gradient, t.shape[1], (1, x.shape[1]))


def accumulate_b(x: torch.Tensor, t: torch.Tensor, sections: Sequence[int], gradient: torch.Tensor) -> None:
    """See `kernels_torch.accumulate_b`."""
    _accumulate_launch(x, t, sections, gradient, gradient.shape[1], (gradient.shape[1], 1))


# ---- between the products --------------------------------------------------------------------------------------------


@triton.jit
def _add_residual(
    base, xa, b, residual, out, M, N,
    R: tl.constexpr, RP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    in_m, in_n = m < M, n < N
    inside = in_m[:, None] & in_n[None]
    at = m[:, None] * N + n[None]
    value = _lora(xa, R, 0, b, m, n, in_m, in_n, R, RP)
    value += tl.load(base + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def add_residual(
    base: torch.Tensor, xa: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, out: torch.Tensor
) -> None:
    """See `kernels_torch.add_residual`."""
    rows, width = base.shape
    rank = xa.shape[1]
    _add_residual[(triton.cdiv(width, 128), triton.cdiv(rows, 64))](
        base, xa, b, residual, out, rows, width, R=rank, RP=_rank_block(rank), BM=64, BN=128, num_warps=4
    )


@triton.jit
def _head_norm(first, second, weight, eps, half, HALF: tl.constexpr):
    """A head's two halves, normalised together."""
    scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
    first *= scale * tl.load(weight + half).to(tl.float32)[None]
    second *= scale * tl.load(weight + HALF + half).to(tl.float32)[None]
    return first, second


@triton.jit
def _rotate_qkv(
    base, bias, xa, b, q_norm, k_norm, eps, cosine, sine, out, raw, M, N,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    BIAS: tl.constexpr, NORMS: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    head = tl.program_id(0)
    section = (head >= HEADS).to(tl.int32) + (head >= HEADS + KV_HEADS).to(tl.int32)
    half = tl.arange(0, HALF)
    n1 = head * 2 * HALF + half
    n2 = n1 + HALF
    in_m, in_n = m < M, half < HALF
    inside = in_m[:, None]
    at1 = m[:, None] * N + n1[None]
    at2 = m[:, None] * N + n2[None]
    first = _lora(xa, 3 * R, section * R, b, m, n1, in_m, in_n, R, RP)
    second = _lora(xa, 3 * R, section * R, b, m, n2, in_m, in_n, R, RP)
    first += tl.load(base + at1, mask=inside, other=0.0).to(tl.float32)
    second += tl.load(base + at2, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        first += tl.load(bias + n1).to(tl.float32)[None]
        second += tl.load(bias + n2).to(tl.float32)[None]
    if section < 2:
        if NORMS:
            width = (HEADS + KV_HEADS) * 2 * HALF
            tl.store(raw + m[:, None] * width + n1[None], first.to(raw.dtype.element_ty), mask=inside)
            tl.store(raw + m[:, None] * width + n2[None], second.to(raw.dtype.element_ty), mask=inside)
            if section == 0:
                first, second = _head_norm(first, second, q_norm, eps, half, HALF)
            else:
                first, second = _head_norm(first, second, k_norm, eps, half, HALF)
        c = tl.load(cosine + m[:, None] * HALF + half[None], mask=inside, other=0.0)
        s = tl.load(sine + m[:, None] * HALF + half[None], mask=inside, other=0.0)
        turned = first * c - second * s
        second = second * c + first * s
        first = turned
    tl.store(out + at1, first.to(out.dtype.element_ty), mask=inside)
    tl.store(out + at2, second.to(out.dtype.element_ty), mask=inside)


def rotate_qkv(
    base: torch.Tensor,
    bias: torch.Tensor | None,
    xa: torch.Tensor,
    b: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    sections: Sequence[int],
    out: torch.Tensor,
    raw: torch.Tensor | None,
) -> None:
    """See `kernels_torch.rotate_qkv`."""
    rows, width = base.shape
    half, rank = cosine.shape[1], b.shape[1]
    heads, kv_heads = sections[0] // (2 * half), sections[1] // (2 * half)
    q_norm, k_norm, eps = norms if norms is not None else (base, base, 0.0)
    _rotate_qkv[(heads + 2 * kv_heads, triton.cdiv(rows, 64))](
        base, bias if bias is not None else base, xa, b, q_norm, k_norm, eps, cosine, sine, out,
        raw if raw is not None else base, rows, width,
        HEADS=heads, KV_HEADS=kv_heads, HALF=half, R=rank, RP=_rank_block(rank),
        BIAS=bias is not None, NORMS=norms is not None, BM=64, num_warps=4,
    )  # fmt: skip


@triton.jit
def _rotate_qkv_backward(
    gradient, raw, q_norm, k_norm, eps, cosine, sine, M, N,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, NORMS: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    head = tl.program_id(0)
    half = tl.arange(0, HALF)
    inside = (m < M)[:, None]
    at = m[:, None] * N + head * 2 * HALF + half[None]
    first = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(gradient + at + HALF, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cosine + m[:, None] * HALF + half[None], mask=inside, other=0.0)
    s = tl.load(sine + m[:, None] * HALF + half[None], mask=inside, other=0.0)
    turned = first * c + second * s
    second = second * c - first * s
    first = turned
    if NORMS:
        before = raw + m[:, None] * ((HEADS + KV_HEADS) * 2 * HALF) + head * 2 * HALF + half[None]
        x1 = tl.load(before, mask=inside, other=0.0).to(tl.float32)
        x2 = tl.load(before + HALF, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / (2 * HALF) + eps)[:, None]
        weight = q_norm if head < HEADS else k_norm
        first *= tl.load(weight + half).to(tl.float32)[None]
        second *= tl.load(weight + HALF + half).to(tl.float32)[None]
        x1 *= scale
        x2 *= scale
        mean = ((tl.sum(first * x1, 1) + tl.sum(second * x2, 1)) / (2 * HALF))[:, None]
        first = scale * (first - x1 * mean)
        second = scale * (second - x2 * mean)
    tl.store(gradient + at, first.to(gradient.dtype.element_ty), mask=inside)
    tl.store(gradient + at + HALF, second.to(gradient.dtype.element_ty), mask=inside)


def rotate_qkv_backward(
    gradient: torch.Tensor,
    raw: torch.Tensor | None,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    sections: Sequence[int],
) -> None:
    """See `kernels_torch.rotate_qkv_backward`."""
    rows, width = gradient.shape
    half = cosine.shape[1]
    heads, kv_heads = sections[0] // (2 * half), sections[1] // (2 * half)
    q_norm, k_norm, eps = norms if norms is not None else (gradient, gradient, 0.0)
    _rotate_qkv_backward[(heads + kv_heads, triton.cdiv(rows, 64))](
        gradient, raw if raw is not None else gradient, q_norm, k_norm, eps, cosine, sine, rows, width,
        HEADS=heads, KV_HEADS=kv_heads, HALF=half, NORMS=norms is not None, BM=64, num_warps=4,
    )  # fmt: skip


@triton.jit
def _swiglu(
    gate_up, xa, b, out, M, N,
    R: tl.constexpr, RP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    in_m, in_n = m < M, n < N
    inside = in_m[:, None] & in_n[None]
    at = m[:, None] * (2 * N) + n[None]
    gate = _lora(xa, 2 * R, 0, b, m, n, in_m, in_n, R, RP)
    up = _lora(xa, 2 * R, R, b + N * R, m, n, in_m, in_n, R, RP)
    gate += tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up += tl.load(gate_up + at + N, mask=inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(out + m[:, None] * N + n[None], value.to(out.dtype.element_ty), mask=inside)


def swiglu(gate_up: torch.Tensor, xa: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """See `kernels_torch.swiglu`."""
    rows, width = out.shape
    rank = b.shape[1]
    _swiglu[(triton.cdiv(width, 64), triton.cdiv(rows, 64))](
        gate_up, xa, b, out, rows, width, R=rank, RP=_rank_block(rank), BM=64, BN=64, num_warps=4
    )


@triton.jit
def _swiglu_backward(
    gate_up, xa, b, act, t, a, gradient, M, N,
    R: tl.constexpr, RP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    in_m, in_n = m < M, n < N
    inside = in_m[:, None] & in_n[None]
    at = m[:, None] * (2 * N) + n[None]
    gate = _lora(xa, 2 * R, 0, b, m, n, in_m, in_n, R, RP)
    up = _lora(xa, 2 * R, R, b + N * R, m, n, in_m, in_n, R, RP)
    above = _lora_back(t, a, N, m, n, in_m, in_n, R, RP)
    gate += tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up += tl.load(gate_up + at + N, mask=inside, other=0.0).to(tl.float32)
    place = act + m[:, None] * N + n[None]
    above += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    swish = gate * sigmoid
    tl.store(place, (swish * up).to(act.dtype.element_ty), mask=inside)
    d_gate = above * up * (sigmoid + swish * (1 - sigmoid))
    tl.store(gradient + at, d_gate.to(gradient.dtype.element_ty), mask=inside)
    tl.store(gradient + at + N, (above * swish).to(gradient.dtype.element_ty), mask=inside)


def swiglu_backward(
    gate_up: torch.Tensor,
    xa: torch.Tensor,
    b: torch.Tensor,
    act: torch.Tensor,
    t: torch.Tensor,
    a: torch.Tensor,
    gradient: torch.Tensor,
) -> None:
    """See `kernels_torch.swiglu_backward`."""
    rows, width = act.shape
    rank = b.shape[1]
    _swiglu_backward[(triton.cdiv(width, 64), triton.cdiv(rows, 64))](
        gate_up, xa, b, act, t, a, gradient, rows, width, R=rank, RP=_rank_block(rank), BM=64, BN=64, num_warps=4
    )


# ---- attention -------------------------------------------------------------------------------------------------------


@triton.jit
def _attention(
    qkv, starts, out, lse, scale, M, N,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    # The last blocks of a long row are the slowest: they start first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    kv_head = head // (HEADS // KV_HEADS)
    m = block * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    in_m = m < M
    q = tl.load(qkv + m[:, None] * N + head * D + d[None], mask=in_m[:, None], other=0.0)
    start = tl.load(starts + m, mask=in_m, other=0).to(tl.int32)
    k_base = qkv + (HEADS + kv_head) * D
    v_base = qkv + (HEADS + KV_HEADS + kv_head) * D
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    value = tl.zeros([BM, D], tl.float32)
    begin = tl.load(starts + block * BM).to(tl.int32) // BN * BN
    for first in range(begin, tl.minimum((block + 1) * BM, M), BN):
        n = first + tl.arange(0, BN)
        in_n = n < M
        k = tl.load(k_base + n[None] * N + d[:, None], mask=in_n[None], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * (scale * _LOG2E)
        allowed = (n[None] <= m[:, None]) & (n[None] >= start[:, None])
        scores = tl.where(allowed, scores, float("-inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)  # a row of the pack may begin behind these keys
        weights = tl.exp2(scores - safe[:, None])
        kept = tl.exp2(top - safe)
        total = total * kept + tl.sum(weights, 1)
        v = tl.load(v_base + n[:, None] * N + d[None], mask=in_n[:, None], other=0.0)
        value = tl.dot(weights.to(v.dtype), v, value * kept[:, None], input_precision="ieee")
        top = new
    total = tl.where(in_m, total, 1.0)
    at = m[:, None] * (HEADS * D) + head * D + d[None]
    tl.store(out + at, (value / total[:, None]).to(out.dtype.element_ty), mask=in_m[:, None])
    tl.store(lse + head * M + m, (top + tl.log2(total)) / _LOG2E, mask=in_m)


def attention(
    qkv: torch.Tensor, starts: torch.Tensor, sections: Sequence[int], dim: int, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """See `kernels_torch.attention`."""
    rows, width = qkv.shape
    heads, kv_heads = sections[0] // dim, sections[1] // dim
    _attention[(triton.cdiv(rows, 64), heads)](
        qkv, starts, out, lse, dim**-0.5, rows, width,
        HEADS=heads, KV_HEADS=kv_heads, D=dim, BM=64, BN=64, num_warps=4, num_stages=3,
    )  # fmt: skip


@triton.jit
def _attention_gradient(
    gradient, t, a, out, delta, M,
    HEADS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    head = tl.program_id(0)
    n = head * D + tl.arange(0, D)
    in_m = m < M
    at = m[:, None] * (HEADS * D) + n[None]
    above = _lora_back(t, a, HEADS * D, m, n, in_m, n < HEADS * D, R, RP)
    above += tl.load(gradient + at, mask=in_m[:, None], other=0.0).to(tl.float32)
    rounded = above.to(gradient.dtype.element_ty)
    tl.store(gradient + at, rounded, mask=in_m[:, None])
    value = tl.load(out + at, mask=in_m[:, None], other=0.0).to(tl.float32)
    tl.store(delta + head * M + m, tl.sum(rounded.to(tl.float32) * value, 1), mask=in_m)


@triton.jit
def _attention_backward_q(
    qkv, starts, gradient, lse, delta, result, scale, M, N,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    kv_head = head // (HEADS // KV_HEADS)
    m = block * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    in_m = m < M
    at = m[:, None] * N + head * D + d[None]
    q = tl.load(qkv + at, mask=in_m[:, None], other=0.0)
    above = tl.load(gradient + m[:, None] * (HEADS * D) + head * D + d[None], mask=in_m[:, None], other=0.0)
    start = tl.load(starts + m, mask=in_m, other=0).to(tl.int32)
    normaliser = tl.load(lse + head * M + m, mask=in_m, other=float("inf")) * _LOG2E
    shift = tl.load(delta + head * M + m, mask=in_m, other=0.0)
    total = tl.zeros([BM, D], tl.float32)
    begin = tl.load(starts + block * BM).to(tl.int32) // BN * BN
    for first in range(begin, tl.minimum((block + 1) * BM, M), BN):
        n = first + tl.arange(0, BN)
        in_n = n < M
        k = tl.load(qkv + n[:, None] * N + (HEADS + kv_head) * D + d[None], mask=in_n[:, None], other=0.0)
        v = tl.load(qkv + n[None] * N + (HEADS + KV_HEADS + kv_head) * D + d[:, None], mask=in_n[None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * _LOG2E)
        allowed = (n[None] <= m[:, None]) & (n[None] >= start[:, None])
        weights = tl.where(allowed, tl.exp2(scores - normaliser[:, None]), 0.0)
        inner = weights * (tl.dot(above, v, input_precision="ieee") - shift[:, None])
        total = tl.dot(inner.to(k.dtype), k, total, input_precision="ieee")
    tl.store(result + at, (total * scale).to(result.dtype.element_ty), mask=in_m[:, None])


@triton.jit
def _attention_backward_kv(
    qkv, starts, ends, gradient, lse, delta, result, scale, M, N,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    # Query heads that share keys are summed here, in order. n: keys, m: queries.
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    n = block * BN + tl.arange(0, BN)
    d = tl.arange(0, D)
    in_n = n < M
    at_k = n[:, None] * N + (HEADS + kv_head) * D + d[None]
    at_v = at_k + KV_HEADS * D
    k = tl.load(qkv + at_k, mask=in_n[:, None], other=0.0)
    v = tl.load(qkv + at_v, mask=in_n[:, None], other=0.0)
    d_k = tl.zeros([BN, D], tl.float32)
    d_v = tl.zeros([BN, D], tl.float32)
    end = tl.load(ends + tl.minimum((block + 1) * BN, M) - 1).to(tl.int32)
    begin = block * BN // BM * BM
    steps = tl.cdiv(end - begin, BM)
    for step in range(steps * (HEADS // KV_HEADS)):
        head = kv_head * (HEADS // KV_HEADS) + step // steps
        m = begin + (step % steps) * BM + tl.arange(0, BM)
        in_m = m < M
        start = tl.load(starts + m, mask=in_m, other=0).to(tl.int32)
        q = tl.load(qkv + m[None] * N + head * D + d[:, None], mask=in_m[None], other=0.0)
        above = tl.load(gradient + m[:, None] * (HEADS * D) + head * D + d[None], mask=in_m[:, None], other=0.0)
        normaliser = tl.load(lse + head * M + m, mask=in_m, other=float("inf")) * _LOG2E
        shift = tl.load(delta + head * M + m, mask=in_m, other=0.0)
        scores = tl.dot(k, q, input_precision="ieee") * (scale * _LOG2E)
        allowed = (n[:, None] <= m[None]) & (n[:, None] >= start[None])
        weights = tl.where(allowed, tl.exp2(scores - normaliser[None]), 0.0)
        d_v = tl.dot(weights.to(above.dtype), above, d_v, input_precision="ieee")
        inner = weights * (tl.dot(v, tl.trans(above), input_precision="ieee") - shift[None])
        d_k = tl.dot(inner.to(q.dtype), tl.trans(q), d_k, input_precision="ieee")
    tl.store(result + at_k, (d_k * scale).to(result.dtype.element_ty), mask=in_n[:, None])
    tl.store(result + at_v, d_v.to(result.dtype.element_ty), mask=in_n[:, None])


def attention_backward(
    qkv: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    sections: Sequence[int],
    dim: int,
    out: torch.Tensor,
    lse: torch.Tensor,
    gradient: torch.Tensor,
    lora: tuple[torch.Tensor, torch.Tensor],
    delta: torch.Tensor,
    result: torch.Tensor,
) -> None:
    """See `kernels_torch.attention_backward`."""
    rows, width = qkv.shape
    heads, kv_heads = sections[0] // dim, sections[1] // dim
    t, a = lora
    sizes = {"HEADS": heads, "KV_HEADS": kv_heads, "D": dim}
    _attention_gradient[(heads, triton.cdiv(rows, 64))](
        gradient, t, a, out, delta, rows,
        HEADS=heads, D=dim, R=t.shape[1], RP=_rank_block(t.shape[1]), BM=64, num_warps=4,
    )  # fmt: skip
    _attention_backward_q[(triton.cdiv(rows, 64), heads)](
        qkv, starts, gradient, lse, delta, result, dim**-0.5, rows, width, **sizes,
        BM=64, BN=64, num_warps=4, num_stages=2,
    )  # fmt: skip
    _attention_backward_kv[(triton.cdiv(rows, 64), kv_heads)](
        qkv, starts, ends, gradient, lse, delta, result, dim**-0.5, rows, width, **sizes,
        BM=64, BN=64, num_warps=4, num_stages=2,
    )  # fmt: skip


# ---- head and optimizer ----------------------------------------------------------------------------------------------


@triton.jit
def _cross_entropy(logits, targets, factor, losses, V, IGNORED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * V
    target = tl.load(targets + row)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, V, BLOCK):
        v = first + tl.arange(0, BLOCK)
        value = tl.load(base + v, mask=v < V, other=float("-inf")).to(tl.float32)
        new = tl.maximum(top, value)
        safe = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp2((top - safe) * _LOG2E) + tl.exp2((value - safe) * _LOG2E)
        top = new
    highest = tl.max(top, 0)
    normaliser = highest + tl.log(tl.sum(total * tl.exp2((top - highest) * _LOG2E), 0))
    counted = target != IGNORED
    own = tl.load(base + target, mask=counted, other=0.0).to(tl.float32)
    tl.store(losses + row, tl.where(counted, normaliser - own, 0.0))
    tl.debug_barrier()  # the target's logit is read before it is overwritten
    weight = tl.where(counted, tl.load(factor), 0.0)
    for first in range(0, V, BLOCK):
        v = first + tl.arange(0, BLOCK)
        value = tl.load(base + v, mask=v < V, other=float("-inf")).to(tl.float32)
        gradient = tl.exp2((value - normaliser) * _LOG2E) - tl.where(v == target, 1.0, 0.0)
        tl.store(base + v, (gradient * weight).to(logits.dtype.element_ty), mask=v < V)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, factor: torch.Tensor, losses: torch.Tensor) -> None:
    """See `kernels_torch.cross_entropy`."""
    rows, width = logits.shape
    block = min(16384, triton.next_power_of_2(width))
    _cross_entropy[(rows,)](logits, targets, factor, losses, width, IGNORED=IGNORED, BLOCK=block, num_warps=16)


@triton.jit
def _adamw(
    masters, exp_avg, exp_avg_sq, gradient, working, first_b, scalars, corrections, norm, N,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    rate, decay = tl.load(scalars), tl.load(scalars + 1)
    largest, scaling = tl.load(scalars + 2), tl.load(scalars + 3)
    first, second = tl.load(corrections), tl.load(corrections + 1)
    length = tl.load(norm)
    scale = tl.where(n < first_b, 1.0, scaling)
    master = tl.load(masters + n, mask=inside, other=0.0)
    if length < float("inf"):  # neither inf nor NaN
        g = tl.load(gradient + n, mask=inside, other=0.0) * scale * tl.minimum(largest / (length + 1e-6), 1.0)
        m = tl.load(exp_avg + n, mask=inside, other=0.0)
        v = tl.load(exp_avg_sq + n, mask=inside, other=0.0)
        m += (g - m) * (1 - BETA1)
        v = v * BETA2 + g * g * (1 - BETA2)
        master = master * (1 - rate * decay) - rate / first * m / (tl.sqrt(v) / tl.sqrt(second) + EPS)
        tl.store(exp_avg + n, m, mask=inside)
        tl.store(exp_avg_sq + n, v, mask=inside)
        tl.store(masters + n, master, mask=inside)
    tl.store(gradient + n, tl.zeros([BLOCK], tl.float32), mask=inside)
    tl.store(working + n, (master * scale).to(working.dtype.element_ty), mask=inside)


def adamw(
    masters: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    gradient: torch.Tensor,
    working: torch.Tensor,
    first_b: int,
    scalars: torch.Tensor,
    corrections: torch.Tensor,
    norm: torch.Tensor,
) -> None:
    """See `kernels_torch.adamw`."""
    _adamw[(triton.cdiv(len(masters), 2048),)](
        masters, exp_avg, exp_avg_sq, gradient, working, first_b, scalars, corrections, norm, len(masters),
        BETA1=BETA1, BETA2=BETA2, EPS=EPS, BLOCK=2048, num_warps=8,
    )  # fmt: skip
