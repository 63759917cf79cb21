"""Decode graphs per layout: what holds without a GPU, with SGLang's own classes."""

from __future__ import annotations

import importlib.util
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from core.errors import Unavailable
from core.partition.part import Part, Partitions
from core.policy.types import WHOLE, Layout

SPLIT, OTHER = Layout("split", 96, 36), Layout("split", 64, 68)
CONFINED, NARROW = Layout("confined", 0, 36), Layout("confined", 0, 68)


@pytest.fixture(scope="module")
def layouts() -> ModuleType:
    if importlib.util.find_spec("sgl_kernel") is None:
        from core.serving import cpu_standin

        cpu_standin.install()
    from core.serving import layouts

    return layouts


class Buffers:
    """What SGLang makes when a runner is made: once for all runners."""

    def __init__(self) -> None:
        self.made = 0

    def init_cuda_graph_state(self, *_: object) -> None:
        self.made += 1

    def init_cuda_graph_batch_info(self, **_: object) -> None:
        self.made += 1


def model_runner(layouts: ModuleType, **arguments: object) -> Any:
    """A model runner with SGLang's decode runner, which is made but not captured."""
    plain = layouts.DecodeCudaGraphRunner.__new__(layouts.DecodeCudaGraphRunner)
    plain.attn_backend, plain.capture_bs = Buffers(), [1, 2, 4, 8]
    return SimpleNamespace(
        decode_cuda_graph_runner=plain,
        lora_manager=Buffers(),
        server_args=SimpleNamespace(**arguments),
        spec_algorithm=SimpleNamespace(is_none=lambda: True),
    )


def stream(number: int) -> Any:
    return SimpleNamespace(cuda_stream=number)


def partitions() -> Partitions:
    high = stream(9)
    parts = [
        Part(WHOLE, None, None), Part(SPLIT, stream(1), stream(2)), Part(OTHER, stream(3), stream(4)),
        Part(CONFINED, high, stream(2)), Part(NARROW, high, stream(4)),
    ]  # fmt: skip
    return Partitions(132, tuple(parts))


@pytest.fixture
def made(layouts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The layouts over a model runner, each capture standing for itself, and that model runner."""
    runner = model_runner(layouts)

    def capture(self: Any, layout: Layout, stream: Any) -> Any:
        # What the constructor of a decode runner does with the shared buffers.
        runner.decode_cuda_graph_runner.attn_backend.init_cuda_graph_state(8, 8)
        runner.lora_manager.init_cuda_graph_batch_info(max_bs_in_cuda_graph=8, num_tokens_per_req=1)
        return f"graphs on stream {stream.cuda_stream}"

    monkeypatch.setattr(layouts.DecodeLayouts, "_capture", capture)
    return layouts.DecodeLayouts(runner, partitions()), runner


def test_selecting_a_layout_is_an_assignment(made: tuple[Any, Any]) -> None:
    decode, runner = made
    plain = runner.decode_cuda_graph_runner
    decode.select(SPLIT)
    assert runner.decode_cuda_graph_runner == "graphs on stream 1"
    decode.select(WHOLE)
    assert runner.decode_cuda_graph_runner is plain


def test_confined_layouts_share_one_set_of_graphs(made: tuple[Any, Any]) -> None:
    decode, runner = made
    decode.select(CONFINED)
    first = runner.decode_cuda_graph_runner
    decode.select(NARROW)
    assert runner.decode_cuda_graph_runner is first == "graphs on stream 9"


def test_buffers_that_captured_graphs_read_are_not_made_again(made: tuple[Any, Any]) -> None:
    decode, runner = made
    decode.select(WHOLE)
    attention, lora = runner.decode_cuda_graph_runner.attn_backend, runner.lora_manager
    assert attention.made == lora.made == 0
    attention.init_cuda_graph_state(8, 8)  # as SGLang's own again, once all are captured
    lora.init_cuda_graph_batch_info()
    assert attention.made == lora.made == 1


def test_a_batch_is_padded_to_the_next_captured_size(made: tuple[Any, Any]) -> None:
    decode, _ = made
    assert [decode.padded(batch) for batch in (1, 3, 8, 9)] == [1, 4, 8, 9]


def test_an_engine_without_decode_graphs_is_refused_with_the_remedy(layouts: ModuleType) -> None:
    runner = model_runner(layouts)
    runner.decode_cuda_graph_runner = None
    with pytest.raises(Unavailable, match="disable_cuda_graph"):
        layouts.DecodeLayouts(runner, partitions())


@pytest.mark.parametrize("mode", ["enable_pdmux", "enable_two_batch_overlap", "enable_return_hidden_states"])
def test_modes_that_capture_other_graphs_are_refused_by_name(layouts: ModuleType, mode: str) -> None:
    with pytest.raises(Unavailable, match=mode):
        layouts.DecodeLayouts(model_runner(layouts, **{mode: True}), partitions())


def test_speculative_decoding_is_refused(layouts: ModuleType) -> None:
    runner = model_runner(layouts)
    runner.spec_algorithm = SimpleNamespace(is_none=lambda: False)
    with pytest.raises(Unavailable, match="speculative"):
        layouts.DecodeLayouts(runner, partitions())
