"""The split LoRA kernels compute what the adapters' matrices say; on a CPU by Triton's interpreter."""

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
RANK, WIDTH = 8, 512


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
@pytest.mark.parametrize("split", [1, 4])
def test_each_row_gets_what_its_adapter_adds(slices: tuple[int, ...], split: int) -> None:
    from benchmarks import split_lora

    generator = torch.Generator().manual_seed(0)

    def rand(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(DEVICE)

    adapters = [1] * 19 + [0, 2, 2] + [1] * 3  # more than a segment of one, none of its own for some
    ranks = [0, RANK, RANK // 2]
    x, out = rand(len(adapters), WIDTH), rand(len(adapters), sum(slices))
    a, b = rand(3, len(slices) * RANK, WIDTH) / 20, rand(3, sum(slices), RANK)
    offsets = torch.tensor([0, *torch.tensor(slices).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    info = info_of(adapters, ranks, room=6)
    expected = out.clone()
    for row, adapter in enumerate(adapters):
        rank = ranks[adapter]
        for number in range(len(slices)):
            part = slice(int(offsets[number]), int(offsets[number + 1]))
            low = a[adapter, number * rank : (number + 1) * rank] @ x[row]
            expected[row, part] += info.scalings[adapter] * (b[adapter, part, :rank] @ low)
    partial = split_lora.shrink(x, a, info, len(slices), split)
    split_lora.expand(partial, b, info, offsets, max(slices), out, block=16)
    torch.testing.assert_close(out, expected, rtol=1e-2 if DEVICE == "cuda" else 1e-4, atol=1e-3)


@fact
def test_a_sum_is_cut_into_equal_parts_of_whole_blocks() -> None:
    from benchmarks.split_lora import splits

    assert [splits(width, 8) for width in (4096, 14336, 3584, 128)] == [8, 8, 7, 1]
    with pytest.raises(ValueError, match="128"):
        splits(576, 8)
