"""Tensors that leave the device for host memory and come back, a window at a time.

A window is copied, its pages are unmapped or mapped, and the next one follows; on a GPU the copies run on a stream of
their own, through page-locked memory, next to whatever computes.

The thread that moves them shares Python with the engine's, which has no time to spare: each time that it lets go, its
next turn may be milliseconds away. Others wait for what leaves, so all of it leaves in one native call, with what that
needs made beforehand. Nobody but the job waits for what comes back: `paced` keeps that below a share of the link's
bandwidth, so that decode is not slowed, and between two windows the caller is free to stop.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from core.memory.arena import Arena, ArenaError, Region, pages_of, unmap_all, view
from core.memory.rate import Rate
from core.memory.staging import staging

logger = logging.getLogger(__name__)

WINDOW_BYTES = 64 * 2**20

# As torch aligns what it allocates.
ALIGN = 512
# Addresses of a scratch, as many times the arena.
_SPREAD = 8

Shapes = Sequence[tuple[tuple[int, ...], torch.dtype]]


class Swappable:
    """Tensors of one owner over a region of their own, of which some windows are on the device and the others in host
    memory; all of them are outside at first, and zero. The tensors keep their addresses; they may be touched while
    everything is `inside`, which ends when `out` begins.

    `out` and `back` belong to one thread at a time; `contents` and `put` may run in any, beside them too.
    """

    def __init__(self, arena: Arena, owner: str, shapes: Shapes, window: int = WINDOW_BYTES) -> None:
        self.owner = owner
        self._places: list[tuple[int, int]] = []  # (first byte, bytes) of each tensor
        end = 0
        for shape, dtype in shapes:
            size = torch.Size(shape).numel() * dtype.itemsize
            self._places.append((end, size))
            end += -(-size // ALIGN) * ALIGN
        self._region: Region = arena.reserve(owner, max(1, pages_of(arena, end)))
        self._window_pages = max(1, window // arena.page_bytes)
        self._page = arena.page_bytes
        self.pages: int = self._region.pages
        with torch.inference_mode(False):
            self._bytes = view(arena, self._region, (self.pages * self._page,), torch.uint8)
            self.tensors: list[torch.Tensor] = [
                view(arena, self._region, tuple(shape), dtype, place)
                for (shape, dtype), (place, _) in zip(shapes, self._places, strict=True)
            ]
        self._device = self._bytes.device
        # What lies outside, by the window's first page; None: zeros, of which nobody has made any yet.
        self._outside: dict[int, torch.Tensor | None] = {first: None for first, _ in self.windows()}
        self._leaving = False
        self._spare: dict[int, torch.Tensor] = {}  # page-locked memory of windows that have no content there
        self._lock = threading.Lock()

    @property
    def inside(self) -> bool:
        """Everything is on the device, and stays."""
        return not self._outside and not self._leaving

    @property
    def mapped(self) -> int:
        """Pages on the device now."""
        return self._region.mapped

    @property
    def host_bytes(self) -> int:
        """What lies in host memory now."""
        return sum(one.numel() for one in list(self._outside.values()) if one is not None)

    def windows(self) -> list[tuple[int, int]]:
        """(first page, pages) of each window."""
        step = self._window_pages
        return [(first, min(step, self.pages - first)) for first in range(0, self.pages, step)]

    def lock_pages(self) -> None:
        """Have the host memory of all windows made and page-locked now, so that the first `out` finds it: making it
        takes longer than filling it. Nothing on a CPU."""
        if self._device.type == "cuda":
            with self._lock:
                for first, count in self.windows():
                    if self._outside.get(first) is None and first not in self._spare:
                        self._spare[first] = self._host(first, count)

    # ---- moves -------------------------------------------------------------------------------------------------------

    def out(self) -> int:
        """Move out what is inside, as fast as it goes; the bytes, whose pages are back in the arena. What computes with
        the tensors must be over before this begins. Raises `ArenaError` with nothing moved."""
        with self._lock:
            leaving = [window for window in self.windows() if window[0] not in self._outside]
            hosts = {first: self._host(first, count) for first, count in leaving}
            self._leaving = True
            try:
                self._region.move_out([(first, count, hosts[first].data_ptr()) for first, count in leaving])
                self._outside.update(hosts)
            except ArenaError:
                self._spare.update(hosts)
                raise
            finally:
                self._leaving = False
            return sum(count for _, count in leaving) * self._page

    def back(self) -> Iterator[int]:
        """Move in window by window; yields the bytes of each once they are there. Raises `ArenaFull` with what is in
        host memory kept there; the next call goes on. Computing may be queued once it is through."""
        for first, count in self.windows():
            if first not in self._outside:
                continue
            with self._lock:
                host = self._outside[first]
                self._region.move_in([(first, count, host.data_ptr() if host is not None else 0)])
                self._is_inside(first)
            yield count * self._page

    def forget(self) -> None:
        """Give every page back and drop the content: zeros, outside."""
        with self._lock:
            inside = [window for window in self.windows() if window[0] not in self._outside]
            for first in self._outside:
                self._set_aside(first)
            self._outside = {first: None for first, _ in self.windows()}
            unmap_all([self._region] * len(inside), [first for first, _ in inside], [count for _, count in inside])

    # ---- content -----------------------------------------------------------------------------------------------------

    def contents(self, which: Iterable[int]) -> list[torch.Tensor]:
        """Copies on the CPU of the tensors at these places, wherever they lie. What computes with them must be over."""
        with self._lock:
            return [self._read(number) for number in which]

    def put(self, values: Sequence[torch.Tensor]) -> None:
        """Make these the tensors' content, wherever they lie."""
        with self._lock:
            for (place, size), target, value in zip(self._places, self.tensors, values, strict=True):
                plain = value.detach().to(target.dtype).contiguous().view(-1).view(torch.uint8)
                for first, count, begin, end in self._covered(place, size):
                    part = plain[begin - place : end - place]
                    if first not in self._outside:
                        staging(self._device).store(self._bytes[begin:end], part)
                        continue
                    host = self._outside[first]
                    if host is None:
                        host = self._outside[first] = self._host(first, count).zero_()
                    host[begin - first * self._page : end - first * self._page].copy_(part)
            _wait_for_device(self._device)

    def _read(self, number: int) -> torch.Tensor:
        (place, size), like = self._places[number], self.tensors[number]
        made = torch.empty(size, dtype=torch.uint8)
        for first, _, begin, end in self._covered(place, size):
            part = made[begin - place : end - place]
            if first not in self._outside:
                staging(self._device).fetch_to(part, self._bytes[begin:end])
            elif (host := self._outside[first]) is not None:
                part.copy_(host[begin - first * self._page : end - first * self._page])
            else:
                part.zero_()
        return made.view(like.dtype).view(like.shape)

    def _covered(self, place: int, size: int) -> Iterator[tuple[int, int, int, int]]:
        """(first page, pages) of the windows that bytes [place, place + size) lie in, and the bytes of it there."""
        for first, count in self.windows():
            begin, end = max(place, first * self._page), min(place + size, (first + count) * self._page)
            if begin < end:
                yield first, count, begin, end

    # ---- host memory -------------------------------------------------------------------------------------------------

    def _host(self, first: int, count: int) -> torch.Tensor:
        """Memory for a window that is going outside."""
        spare = self._spare.pop(first, None)
        if spare is not None:
            return spare
        size = count * self._page
        with torch.inference_mode(False):
            if self._device.type == "cuda":
                try:
                    with torch.cuda.device(self._device):  # whose context the memory is locked for
                        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
                except RuntimeError as error:
                    logger.warning("a window of %d bytes cannot be page-locked, its copy is slow: %s", size, error)
            return torch.empty(size, dtype=torch.uint8)

    def _is_inside(self, first: int) -> None:
        self._set_aside(first)
        del self._outside[first]

    def _set_aside(self, first: int) -> None:
        """Keep the memory of a window for the next time that it goes outside, where making it takes long."""
        host = self._outside[first]
        if host is not None and self._device.type == "cuda":
            self._spare[first] = host


class Scratch:
    """Tensors of one owner that are either all there, zero at first, or not at all: what need not be kept. Each is
    handed out by `take` before the first `map`, over addresses that stay."""

    def __init__(self, arena: Arena, owner: str) -> None:
        self._arena = arena
        # Addresses cost nothing; that there are too few pages is for `map` to say.
        self._region: Region = arena.reserve(owner, _SPREAD * arena.statistics().capacity)
        self._end = 0
        self.mappings = 0  # so far

    @property
    def pages(self) -> int:
        """Of all tensors."""
        return pages_of(self._arena, self._end)

    @property
    def mapped(self) -> int:
        """Pages that it has now: all of them or none."""
        return self._region.mapped

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor. Raises `ArenaError` when all of them would be many times what the arena has."""
        with torch.inference_mode(False):
            tensor = view(self._arena, self._region, shape, dtype, self._end)
        self._end += -(-tensor.numel() * dtype.itemsize // ALIGN) * ALIGN
        return tensor

    def map(self) -> None:
        """Put pages behind all tensors and make them zero: what lay in those pages was somebody else's. Waits for it.
        Raises `ArenaFull` with nothing mapped."""
        self._region.map(0, self.pages)
        whole = view(self._arena, self._region, (self._end,), torch.uint8)
        whole.zero_()
        _wait_for_device(whole.device)
        self.mappings += 1

    def unmap(self) -> None:
        """Give the pages back; what computes with the tensors must be over."""
        if self._region.mapped:
            self._region.unmap(0, self._region.mapped)


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


def _wait_for_device(device: torch.device) -> None:
    """What this thread has queued is over."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
