"""How many segments SGLang's LoRA kernels can find in a decode batch."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.serving.lora_batch import most_segments, prepare_lora_batch


@given(counts=st.lists(st.integers(0, 70), min_size=1, max_size=5), unused=st.integers(0, 3))
def test_no_batch_has_more_segments_than_there_is_room_for(counts: list[int], unused: int) -> None:
    """As SGLang cuts them (`_get_segments_info`): each adapter's tokens by 16."""
    segments = sum(-(-count // 16) for count in counts)
    assert segments <= most_segments(sum(counts), len(counts) + unused)


def test_the_room_is_a_fraction_of_the_largest_batch() -> None:
    assert most_segments(32, 2) == 4
    assert most_segments(128, 4) == 12
    assert most_segments(1, 4) == 1


@dataclass
class Info:
    use_cuda_graph: bool
    weight_indices: torch.Tensor


@pytest.mark.parametrize("graph", [True, False])
def test_a_captured_batch_shows_the_kernels_its_own_segments_in_the_same_memory(graph: bool) -> None:
    whole = torch.arange(128)
    backend = SimpleNamespace(batch_info=None, max_loras_per_batch=2)

    def original(backend: Any, forward_batch: Any, **_: Any) -> None:
        backend.batch_info = Info(graph, whole)

    prepare_lora_batch(original, backend, SimpleNamespace(batch_size=32), weight_indices=[0] * 32)
    seen = backend.batch_info.weight_indices
    assert seen.data_ptr() == whole.data_ptr()
    assert len(seen) == (4 if graph else 128)
    assert len(whole) == 128
