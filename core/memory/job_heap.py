"""A finetune job's own CUDA memory: torch allocates it from the arena, within a cap.

Torch's caching allocator asks a `MemPool` with a pluggable allocator for its segments; ours maps pages for each. What
the job may not have is then an ordinary `torch.OutOfMemoryError` in the job, and everything that it had is back in the
arena when its pool is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from core.memory import _arena
from core.memory.arena import Arena, pages_of

# Addresses per page of the cap: segments of different sizes come and go, and addresses cost nothing.
_SPREAD = 4


class JobHeap:
    """At most `cap_bytes` of the arena for `owner`; `allocating` makes this thread's tensors come from it."""

    def __init__(self, arena: Arena, owner: str, cap_bytes: int) -> None:
        cap = pages_of(arena, cap_bytes)
        self._page_bytes = arena.page_bytes
        self._heap = arena.heap(owner, cap, cap * _SPREAD)
        self._device = torch.device("cuda", arena.device_id)
        allocator = torch.cuda.memory.CUDAPluggableAllocator(_arena.__file__, "harli_malloc", "harli_free")
        self._allocator = allocator  # the pool refers to it
        self._pool = torch.cuda.MemPool(allocator.allocator())  # type: ignore[no-untyped-call]

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """CUDA tensors that this thread makes inside belong to the job. One job at a time in a process."""
        _arena.select_heap(self._heap)
        try:
            with torch.cuda.use_mem_pool(self._pool, self._device):
                yield
        finally:
            _arena.select_heap(None)

    @property
    def used_bytes(self) -> int:
        """What torch has of the arena for the job now, whole segments."""
        return self._heap.used * self._page_bytes

    @property
    def high_water_bytes(self) -> int:
        return self._heap.high_water * self._page_bytes

    @property
    def refusal(self) -> str:
        """Why the last allocation that failed did, in the arena's words; empty when none has."""
        return self._heap.last_refusal
