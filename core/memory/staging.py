"""Copies between a device and ordinary host memory that keep nobody waiting but the thread that asks for them.

The driver copies memory that is not page-locked by way of its own buffers, and launches nothing for other threads
meanwhile: decode stood still for 100 ms at each 168 MB that a checkpoint took off an H200. Here the way is through two
page-locked pieces, on a stream of their own, within a rate.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import cache

import torch

from core.memory.rate import GPU_RATE, Rate

PIECE_BYTES = 4 * 2**20


class Staging:
    """The pieces of one device, page-locked once since that takes long; for any thread, one copy at a time. On a CPU
    the pieces are plain copies. The engine has one for each device: `staging`."""

    def __init__(self, device: torch.device, rate: Rate = GPU_RATE) -> None:
        self._device = device
        self._rate = rate if device.type == "cuda" else Rate()
        self._lock = threading.Lock()
        self._stream = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            with torch.cuda.device(device), torch.inference_mode(False):
                self._pieces = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
                # A thread that waits for one of these sleeps.
                self._through = [torch.cuda.Event(blocking=True) for _ in range(2)]  # type: ignore[no-untyped-call]

    def fetch(self, source: torch.Tensor) -> torch.Tensor:
        """A copy on the CPU of a contiguous tensor, as it is once what the calling thread's stream has queued is
        over."""
        made = torch.empty(source.shape, dtype=source.dtype)
        self.fetch_to(made, source)
        return made

    def fetch_to(self, made: torch.Tensor, source: torch.Tensor) -> None:
        """`fetch` into a contiguous CPU tensor of the same size in bytes."""
        with self._lock, torch.inference_mode(False):
            self._fetch(_bytes(made), _bytes(source))

    def store(self, target: torch.Tensor, value: torch.Tensor) -> None:
        """Make a CPU tensor the content of a contiguous one of its shape and dtype; it is there when this returns.
        What the calling thread's stream has queued comes before."""
        with self._lock, torch.inference_mode(False):
            self._store(_bytes(target), _bytes(value.contiguous()))

    def _fetch(self, made: torch.Tensor, source: torch.Tensor) -> None:
        if self._stream is None:
            made.copy_(source)
            return
        self._begin()
        waiting: tuple[int, slice] | None = None
        for turn, span in self._spans(source.numel()):
            with torch.cuda.stream(self._stream):
                self._pieces[turn][: span.stop - span.start].copy_(source[span], non_blocking=True)
                self._through[turn].record(self._stream)
            if waiting is not None:
                self._empty(made, *waiting)
            waiting = turn, span
        if waiting is not None:
            self._empty(made, *waiting)

    def _empty(self, made: torch.Tensor, turn: int, span: slice) -> None:
        """Take a piece's content out of it once it is there."""
        self._through[turn].synchronize()
        made[span].copy_(self._pieces[turn][: span.stop - span.start])

    def _store(self, target: torch.Tensor, value: torch.Tensor) -> None:
        if self._stream is None:
            target.copy_(value)
            return
        self._begin()
        for turn, span in self._spans(value.numel()):
            self._through[turn].synchronize()  # nothing at first
            piece = self._pieces[turn][: span.stop - span.start]
            piece.copy_(value[span])
            with torch.cuda.stream(self._stream):
                target[span].copy_(piece, non_blocking=True)
                self._through[turn].record(self._stream)
        for event in self._through:
            event.synchronize()

    def _begin(self) -> None:
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def _spans(self, size: int) -> Iterator[tuple[int, slice]]:
        """The places of a copy's pieces in turn, each when the rate allows it."""
        began = time.perf_counter()
        for number, first in enumerate(range(0, size, PIECE_BYTES)):
            if (wait := self._rate.wait_s(first, time.perf_counter() - began)) > 0:
                time.sleep(wait)
            yield number % 2, slice(first, min(size, first + PIECE_BYTES))


@cache
def staging(device: torch.device) -> Staging:
    """That of a device, at the rate that copies may have beside decode."""
    return Staging(device)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
