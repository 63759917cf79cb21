"""SGLang's decode graphs (0.5.16), once per layout: one graph runner each, captured on the layout's decode stream.

A CUDA graph keeps the SMs and the priority of the stream that it was captured on, so switching a layout is assigning
another runner to the model runner before a batch is launched. All runners share SGLang's graph memory pool (they never
run together) and the static buffers that prepare a batch: the attention back end's metadata and the LoRA batch
information are written once a step and read by whichever graph is launched, so they must not be made again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.distributed.parallel_state import graph_capture
from sglang.srt.model_executor.runner.base_cuda_graph_runner import freeze_gc
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

from core.errors import Unavailable
from core.partition.part import Partitions
from core.policy.types import Layout


class LayoutRunner(DecodeCudaGraphRunner):  # type: ignore[misc]
    """A decode runner whose graphs belong to one stream."""

    def __init__(self, model_runner: Any, stream: torch.cuda.Stream) -> None:
        self._layout_stream = stream
        super().__init__(model_runner)

    def capture(self) -> None:
        """As SGLang's, on the layout's stream."""
        self.buffers.seq_lens.fill_(self.seq_len_fill_value)
        self.buffers.seq_lens_cpu.fill_(self.seq_len_fill_value)
        with (
            freeze_gc(self.model_runner.server_args.enable_cudagraph_gc),
            graph_capture(stream=self._layout_stream) as context,
            self.backend.capture_session(context.stream),
        ):
            self.stream = context.stream
            self._capture_one_stream()


@dataclass(frozen=True, slots=True)
class Captured:
    """What capturing the graphs of a layout cost."""

    layout: Layout
    seconds: float
    bytes: int


class DecodeLayouts:
    """The decode graphs of every partition. `select` costs an assignment.

    Raises `Unavailable` when the engine has no decode graphs to begin with, or serves in a way that captures more than
    one kind of them.
    """

    def __init__(self, model_runner: Any, partitions: Partitions) -> None:
        plain = model_runner.decode_cuda_graph_runner
        _check(model_runner, plain)
        self._model_runner = model_runner
        self._runners: dict[Layout, Any] = {}
        self.captured: list[Captured] = []
        by_stream: dict[int, Any] = {}
        with _kept_buffers(plain.attn_backend, getattr(model_runner, "lora_manager", None)):
            for part in partitions.parts:
                if part.decode is None:
                    self._runners[part.layout] = plain
                    continue
                runner = by_stream.get(part.decode.cuda_stream)
                if runner is None:
                    runner = by_stream[part.decode.cuda_stream] = self._capture(part.layout, part.decode)
                self._runners[part.layout] = runner
        self._sizes = tuple(plain.capture_bs)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Captured batch sizes, rising."""
        return self._sizes

    def padded(self, batch: int) -> int:
        """The captured size that a batch is padded to; the batch itself when it is too large for any graph."""
        return next((size for size in self._sizes if size >= batch), batch)

    def select(self, layout: Layout) -> None:
        """The next decode batch is launched with the graphs of `layout`."""
        self._model_runner.decode_cuda_graph_runner = self._runners[layout]

    def _capture(self, layout: Layout, stream: torch.cuda.Stream) -> LayoutRunner:
        began, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
        with torch.inference_mode():
            runner = LayoutRunner(self._model_runner, stream)
        torch.cuda.synchronize()
        self.captured.append(Captured(layout, time.perf_counter() - began, free - torch.cuda.mem_get_info()[0]))
        return runner


def _check(model_runner: Any, plain: Any) -> None:
    if not isinstance(plain, DecodeCudaGraphRunner):
        raise Unavailable(
            "no_decode_graphs",
            "SM partitions need SGLang's decode CUDA graphs, and this engine has none; start it without "
            "disable_cuda_graph",
            "engine",
        )
    arguments = model_runner.server_args
    for name in ("enable_pdmux", "enable_two_batch_overlap", "enable_return_hidden_states"):
        if getattr(arguments, name, False):
            raise Unavailable(
                "engine_mode", f"SM partitions do not go with SGLang's {name}; start the engine without it", "engine"
            )
    if not model_runner.spec_algorithm.is_none():
        raise Unavailable(
            "engine_mode",
            "SM partitions do not go with speculative decoding; start the engine without it",
            "engine",
        )


@contextmanager
def _kept_buffers(attention: Any, lora: Any) -> Iterator[None]:
    """While further runners are made, nothing remakes buffers that captured graphs read."""
    kept = [(attention, "init_cuda_graph_state")]
    if lora is not None:
        kept.append((lora, "init_cuda_graph_batch_info"))
    for owner, name in kept:
        setattr(owner, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        for owner, name in kept:
            delattr(owner, name)
