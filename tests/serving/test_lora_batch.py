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


class Backend:
    """Of SGLang's: one set of tensors for the batches of graphs, another for each other batch."""

    max_loras_per_batch = 2

    def __init__(self) -> None:
        self.batch_info: Any = None
        self.lm_head_batch_info: Any = "prefill's"
        self.lm_head_pass_batch_infos: Any = "prefill's"
        self.shared = torch.zeros(128, dtype=torch.int32)
        self.written = 0

    def prepare_lora_batch(self, forward_batch: Any, weight_indices: list[int], use_cuda_graph: bool, **_: Any) -> None:
        place = self.shared if use_cuda_graph else torch.zeros(128, dtype=torch.int32)
        place[: len(weight_indices)] = torch.tensor(weight_indices, dtype=torch.int32)
        self.batch_info, self.written = Info(use_cuda_graph, place), self.written + 1


def prepare(backend: Backend, slots: list[int], graph: bool = True, rank: int = 8) -> torch.Tensor:
    """What the kernels see of a batch of requests with adapters in these slots."""
    prepare_lora_batch(
        Backend.prepare_lora_batch, backend, SimpleNamespace(batch_size=len(slots)), slots, [0, rank], [0.0, 1.0], graph
    )
    seen = backend.batch_info.weight_indices
    assert isinstance(seen, torch.Tensor)
    return seen


@pytest.mark.parametrize("graph", [True, False])
def test_a_captured_batch_shows_the_kernels_its_own_segments_in_the_same_memory(graph: bool) -> None:
    backend = Backend()
    seen = prepare(backend, [1] * 32, graph)
    assert (seen.data_ptr() == backend.shared.data_ptr()) == graph
    assert len(seen) == (4 if graph else 128)
    assert len(backend.shared) == 128


def test_a_batch_like_the_one_before_it_is_left_as_it_is() -> None:
    backend = Backend()
    first = prepare(backend, [1, 0, 1])
    prepare(backend, [0, 1], graph=False)  # a prefill between two decode steps
    assert backend.written == 2
    assert torch.equal(prepare(backend, [1, 0, 1]), first)
    assert backend.written == 2
    assert backend.lm_head_batch_info is None
    assert backend.lm_head_pass_batch_infos is None


@pytest.mark.parametrize("change", [{"slots": [1, 1, 1]}, {"slots": [1, 0]}, {"slots": [1, 0, 1], "rank": 4}])
def test_what_changed_is_told_again(change: dict[str, Any]) -> None:
    backend = Backend()
    prepare(backend, [1, 0, 1])
    prepare(backend, **change)
    assert backend.written == 2
