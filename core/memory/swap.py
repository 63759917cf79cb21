"""Tensors that leave the device for host memory and come back, a window at a time.

On a GPU the copies run on a stream of their own, through page-locked windows, next to whatever computes; `rate` keeps
them below a share of the link's bandwidth, so that decode is not slowed. A window is copied, its rows are unmapped or
mapped, and the next one follows; between two windows the caller is free to stop. On a CPU the copies are plain ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from core.memory.arena import Arena, Region, pages_of, view

WINDOW_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Rate:
    """At most `bytes_s` bytes a second, on average since the swap began; None: as fast as it goes."""

    bytes_s: float | None = None

    def wait_s(self, done: int, elapsed_s: float) -> float:
        """Seconds to wait before the next window, `done` bytes after `elapsed_s`."""
        return max(0.0, done / self.bytes_s - elapsed_s) if self.bytes_s else 0.0


class Swappable:
    """Tensors of one owner over a region of their own, of which some windows are on the device and the others in host
    memory. The tensors keep their addresses; they may be used while everything is `inside`.

    Raises `ArenaFull` when there are not pages enough for all of it at the start.
    """

    def __init__(
        self,
        arena: Arena,
        owner: str,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        window: int = WINDOW_BYTES,
    ) -> None:
        sizes = [-(-torch.Size(shape).numel() * dtype.itemsize // _ALIGN) * _ALIGN for shape in shapes]
        self._region: Region = arena.reserve(owner, max(1, pages_of(arena, sum(sizes))))
        self._window_pages = max(1, window // arena.page_bytes)
        self._region.map(0, self._region.pages)
        self._bytes = view(arena, self._region, (self._region.pages * arena.page_bytes,), torch.uint8)
        self._page = arena.page_bytes
        self._device = self._bytes.device
        self._host: dict[int, torch.Tensor] = {}
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        offset = 0
        self.tensors: list[torch.Tensor] = []
        for shape, size in zip(shapes, sizes, strict=True):
            self.tensors.append(view(arena, self._region, tuple(shape), dtype, offset))
            offset += size

    @property
    def inside(self) -> bool:
        """Everything is on the device."""
        return not self._host

    @property
    def host_bytes(self) -> int:
        """What lies in host memory now."""
        return sum(one.numel() for one in self._host.values())

    def windows(self) -> list[tuple[int, int]]:
        """(first page, pages) of each window."""
        pages, step = self._region.pages, self._window_pages
        return [(first, min(step, pages - first)) for first in range(0, pages, step)]

    def out(self) -> Iterator[int]:
        """Move out window by window; yields the bytes of each once its pages are back in the arena. What computes with
        the tensors must be queued on the device before this begins."""
        self._behind_compute()
        for first, count in reversed(self.windows()):
            if first in self._host:
                continue
            held = self._bytes[first * self._page : (first + count) * self._page]
            host = torch.empty(held.shape, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            self._copy(host, held)
            self._region.unmap(first, count)
            self._host[first] = host
            yield host.numel()

    def back(self) -> Iterator[int]:
        """Move in window by window; yields the bytes of each once they are there. Raises `ArenaFull` with what is in
        host memory kept there; the next call goes on. Computing may be queued once it is through."""
        for first, count in self.windows():
            if first not in self._host:
                continue
            self._region.map(first, count)
            held = self._bytes[first * self._page : (first + count) * self._page]
            self._copy(held, self._host[first])
            del self._host[first]
            yield held.numel()

    def _behind_compute(self) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self._stream is None:
            target.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        # The window's pages change hands next, so its copy has to be over; the calling thread waits, not the device.
        self._stream.synchronize()


def paced(
    windows: Iterator[int],
    rate: Rate,
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Run a swap to its end at `rate`; the bytes that were moved. For a thread of the swap's own."""
    began, done = clock(), 0
    for size in windows:
        done += size
        if (wait := rate.wait_s(done, clock() - began)) > 0:
            sleep(wait)
    return done


# As torch aligns what it allocates.
_ALIGN = 512
