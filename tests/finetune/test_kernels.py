"""Each Triton kernel computes what its counterpart in plain torch does; on a CPU by Triton's interpreter."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from core.finetune import kernels_torch

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]
# On a GPU fp32 products may be tf32's in torch, and bf16 is rounded in other places.
TOLERANCE = 1e-2 if DEVICE == "cuda" else 1e-4
R = 8
HEADS, KV_HEADS, DIM = 4, 2, 32
SECTIONS = (HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM)
QKV = sum(SECTIONS)
M, H, I = 150, 96, 192  # noqa: E741


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
fact = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="runs in a process with Triton's interpreter")


@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="the facts below run here")
def test_the_facts_below_under_the_interpreter() -> None:
    """Triton chooses its interpreter when it is imported, which in this process may have happened."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    """Imported late: without a GPU only the interpreter's process can."""
    return importlib.import_module("core.finetune.kernels")


@pytest.fixture(params=DTYPES, ids=str)
def rand(request: pytest.FixtureRequest) -> Callable[..., torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def make(*size: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(size, generator=generator) * scale).to(DEVICE, dtype or request.param)

    return make


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Where each packed row begins and ends, per position: rows shorter and longer than a block, and padding."""
    lengths = torch.tensor([3, 90, 40, 17])
    ends = lengths.cumsum(0)
    return (ends - lengths).repeat_interleave(lengths).to(DEVICE), ends.repeat_interleave(lengths).to(DEVICE)


def same(kernels: ModuleType, name: str, *arguments: Any, scratch: int | None = None) -> None:
    """Both modules' function of that name leaves the same in every tensor but argument `scratch`."""

    def copies() -> list[Any]:
        made: dict[int, torch.Tensor] = {}  # an argument that is given twice stays one tensor

        def copy(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return made.setdefault(id(value), value.clone())
            return tuple(copy(part) for part in value) if isinstance(value, tuple) else value

        return [copy(value) for value in arguments]

    expected, got = copies(), copies()
    with torch.no_grad():
        getattr(kernels_torch, name)(*expected)
        getattr(kernels, name)(*got)
    changed = False
    for place, (before, a, b) in enumerate(zip(arguments, expected, got, strict=True)):
        if place == scratch:
            continue
        if isinstance(a, torch.Tensor) and torch.isfinite(before).all():
            assert torch.isfinite(b).all()
            error = (b.double() - a.double()).norm() / a.double().norm().clamp(min=1e-9)
            assert error < TOLERANCE, (name, float(error))
            changed |= not torch.equal(a, before)
    assert changed


@fact
def test_norm(kernels: ModuleType, rand: Callable[..., torch.Tensor]) -> None:
    fp32 = torch.float32
    x, weight, rstd = rand(M, H), rand(H), rand(M, dtype=fp32)
    same(kernels, "rms_norm", x, weight, 1e-5, rand(M, H), rstd)
    kernels_torch.rms_norm(x, weight, 1e-5, rand(M, H), rstd)
    residual = rand(M, H)
    lora = (rand(M, 2 * R), rand(2 * R, H))
    same(kernels, "rms_norm_backward", rand(M, H), lora, x, weight, rstd, residual, residual, rand(M, H), scratch=0)
    gradient = rand(M, H)
    same(kernels, "rms_norm_backward", gradient, None, x, weight, rstd, None, gradient, None)


@fact
@pytest.mark.parametrize("rank", [2, 24, 64])
def test_lora_products(rank: int, kernels: ModuleType, rand: Callable[..., torch.Tensor]) -> None:
    fp32 = torch.float32
    same(kernels, "project", rand(M, H), rand(3 * rank, H), rand(M, 3 * rank))
    same(kernels, "project_sections", rand(M, QKV), rand(QKV, rank), SECTIONS, rand(M, 3 * rank))
    same(kernels, "project_sections", rand(M, 2 * I), rand(2 * I, rank), (I, I), rand(M, 2 * rank))
    same(kernels, "accumulate_a", rand(M, 3 * rank), rand(M, H), rand(3 * rank, H, dtype=fp32))
    same(kernels, "accumulate_b", rand(M, QKV), rand(M, 3 * rank), SECTIONS, rand(QKV, rank, dtype=fp32))
    same(kernels, "accumulate_b", rand(M, H), rand(M, rank), (H,), rand(H, rank, dtype=fp32))
    same(kernels, "add_residual", rand(M, H), rand(M, rank), rand(H, rank), rand(M, H), rand(M, H))


@fact
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_rotation(bias: bool, norms: bool, kernels: ModuleType, rand: Callable[..., torch.Tensor]) -> None:
    cosine, sine = rand(M, DIM // 2, dtype=torch.float32), rand(M, DIM // 2, dtype=torch.float32)
    weights = (rand(DIM), rand(DIM), 1e-6) if norms else None
    raw = rand(M, SECTIONS[0] + SECTIONS[1])
    same(
        kernels, "rotate_qkv", rand(M, QKV), rand(QKV) if bias else None, rand(M, 3 * R), rand(QKV, R), weights, cosine,
        sine, SECTIONS, rand(M, QKV), raw if norms else None,
    )  # fmt: skip
    same(kernels, "rotate_qkv_backward", rand(M, QKV), raw if norms else None, weights, cosine, sine, SECTIONS)


@fact
def test_swiglu(kernels: ModuleType, rand: Callable[..., torch.Tensor]) -> None:
    gate_up, xa, b = rand(M, 2 * I), rand(M, 2 * R), rand(2 * I, R, scale=0.3)
    same(kernels, "swiglu", gate_up, xa, b, rand(M, I))
    same(kernels, "swiglu_backward", gate_up, xa, b, rand(M, I), rand(M, R), rand(R, I), rand(M, 2 * I))


@fact
def test_attention(kernels: ModuleType, rand: Callable[..., torch.Tensor]) -> None:
    starts, ends = rows()
    qkv, out, lse = rand(M, QKV), rand(M, SECTIONS[0]), rand(HEADS, M, dtype=torch.float32)
    same(kernels, "attention", qkv, starts, SECTIONS, DIM, out, lse)
    kernels_torch.attention(qkv, starts, SECTIONS, DIM, out, lse)
    lora = (rand(M, R), rand(R, SECTIONS[0]))
    delta = rand(HEADS, M, dtype=torch.float32)
    same(
        kernels, "attention_backward", qkv, starts, ends, SECTIONS, DIM, out, lse, rand(M, SECTIONS[0]), lora, delta,
        rand(M, QKV),
    )  # fmt: skip


@fact
def test_cross_entropy(kernels: ModuleType, rand: Callable[..., torch.Tensor]) -> None:
    targets = torch.randint(0, 1000, (M,)).to(DEVICE)
    targets[::3] = kernels_torch.IGNORED
    factor = torch.tensor([0.1], device=DEVICE)
    same(kernels, "cross_entropy", rand(M, 1000, scale=3.0), targets, factor, rand(M, dtype=torch.float32))


@fact
@pytest.mark.parametrize("norm", [0.5, 7.0, float("inf"), float("nan")])
def test_adamw(norm: float, kernels: ModuleType, rand: Callable[..., torch.Tensor]) -> None:
    fp32 = torch.float32
    n = 3000
    same(
        kernels, "adamw", rand(n, dtype=fp32), rand(n, dtype=fp32), rand(n, dtype=fp32).abs(), rand(n, dtype=fp32),
        rand(n), 1000, torch.tensor([1e-2, 0.1, 1.0, 2.0], device=DEVICE), torch.tensor([0.1, 0.001], device=DEVICE),
        torch.tensor([norm], device=DEVICE),
    )  # fmt: skip
