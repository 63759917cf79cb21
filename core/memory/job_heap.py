"""Activations that torch allocates on a GPU: from the arena, within what was granted.

Torch's caching allocator asks a `MemPool` with a pluggable allocator for its segments; ours maps pages for each. What
the job may not have is then an ordinary `torch.OutOfMemoryError` in the job, and everything that it had is back in the
arena when its pool is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from core.memory import _arena
from core.memory.arena import Arena, OutOfMemory
from core.memory.metered import beyond, more

# Addresses per page of the ceiling: segments of different sizes come and go, and addresses cost nothing.
_SPREAD = 4


class JobHeap:
    """At most `ceiling` pages of the arena for `owner`, none at first; `computing` makes this thread's CUDA tensors
    come from it. One job at a time in a process."""

    def __init__(self, arena: Arena, owner: str, ceiling: int) -> None:
        self._page_bytes, self._ceiling = arena.page_bytes, ceiling
        self._heap = arena.heap(owner, 0, max(1, ceiling * _SPREAD))
        self._needed = 0
        self._device = torch.device("cuda", arena.device_id)
        self._allocator = torch.cuda.memory.CUDAPluggableAllocator(_arena.__file__, "harli_malloc", "harli_free")
        self._pool = self._new_pool()

    @property
    def held(self) -> int:
        """Pages that were granted."""
        return max(self._heap.cap, self._heap.used)

    @property
    def promised(self) -> int:
        """Of those, the ones that torch has not asked for yet."""
        return max(0, self._heap.cap - self._heap.used)

    @property
    def needed(self) -> int:
        return self._needed

    def grant(self, pages: int) -> None:
        """So many more; they are mapped when torch asks for them."""
        self._heap.cap += pages

    def give_up(self) -> None:
        """Give all pages back; the tensors in them are gone."""
        self._heap.cap = 0
        self._pool = self._new_pool()  # the one before goes, and with it the segments that torch keeps for it

    @contextmanager
    def computing(self) -> Iterator[None]:
        """See `core.memory.share.GrowingActivations`."""
        _arena.select_heap(self._heap)
        try:
            # A pool is one thread's: the backward may have none of its own.
            with torch.cuda.use_mem_pool(self._pool, self._device), torch.autograd.set_multithreading_enabled(False):
                yield
        except torch.OutOfMemoryError as error:
            why = self._heap.last_refusal or str(error)
            raise OutOfMemory(f"{why}; {beyond(self._ceiling * self._page_bytes)}") from error
        finally:
            _arena.select_heap(None)

    def ask(self) -> bool:
        """See `core.memory.share.GrowingActivations`."""
        self._needed = more(self._heap.cap, self._heap.used + 1, self._needed, self._ceiling)
        return self._needed > self._heap.cap

    def _new_pool(self) -> torch.cuda.MemPool:
        with torch.cuda.device(self._device):  # it belongs to the current one
            return torch.cuda.MemPool(self._allocator.allocator())  # type: ignore[no-untyped-call]
