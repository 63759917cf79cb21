"""A finetune job's share of the arena, where another allocator hands out its tensors (torch's, on a CPU).

The share is claimed, page by page, before it is used: `state` for as long as the job lives, and `activations`, what
autograd saves between forward and backward, which is counted tensor by tensor and never passes what was granted. A
micro-batch that needs more is given up and starts again when more has been granted; what can never be granted is an
`OutOfMemory` that ends the job.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from core.memory.arena import Arena, Claim, OutOfMemory, pages_of


class JobShare:
    """`state_bytes` and activations of `owner`, at most `cap` pages; nothing is claimed at first.

    Granting and taking belong to one thread, `metering` to the one that computes.
    """

    def __init__(self, arena: Arena, owner: str, state_bytes: int, cap: int, *, shared: Iterable[torch.Tensor]) -> None:
        self.owner = owner
        self.cap = cap
        self.state = pages_of(arena, state_bytes)
        self.closed = False
        self._arena = arena
        self._claim: Claim | None = arena.claim(owner, 0)
        self._needed = 0  # pages of activations that the job is known to need
        self._meter = _Meter({tensor.untyped_storage().data_ptr() for tensor in shared})
        self._lock = threading.Lock()

    @property
    def held(self) -> int:
        """Pages claimed now."""
        return self._claim.pages if self._claim is not None else 0

    @property
    def activations(self) -> int:
        """Pages claimed for activations."""
        return max(0, self.held - self.state)

    @property
    def wanted(self) -> int:
        """Pages that have to be granted before the job can go on."""
        return 0 if self.closed else max(0, self.state + self._needed - self.held)

    @property
    def high_water_bytes(self) -> int:
        """The most that was ever saved at once."""
        return self._meter.high_water

    def grant(self, pages: int) -> None:
        """Claim `pages` more. Raises `ArenaFull` with the share as it was."""
        with self._lock:
            if self._claim is not None:
                self._claim.resize(self._claim.pages + pages)

    def give_up_activations(self) -> None:
        """Back to the state alone; what is saved must be on its way out."""
        with self._lock:
            if self._claim is not None:
                self._claim.resize(min(self._claim.pages, self.state))

    def close(self) -> None:
        """Give everything back."""
        with self._lock:
            self.closed, self._claim = True, None

    @contextmanager
    def metering(self) -> Iterator[None]:
        """Around computation whose saved tensors count. Raises `OutOfMemory` when they pass what is granted; `ask` says
        what becomes of it."""
        self._meter.limit = self.activations * self._arena.page_bytes
        with torch.autograd.graph.saved_tensors_hooks(self._meter.save, self._meter.load):
            yield

    def ask(self) -> bool:
        """After `OutOfMemory`: ask for twice what was granted, between an eighth of what the cap leaves and all of it;
        False when that is granted already."""
        ceiling = self.cap - self.state
        if self.activations >= ceiling:
            return False
        # Each time the micro-batch has run for nothing: a few large steps rather than many small ones.
        at_least = max(pages_of(self._arena, self._meter.refused), ceiling // 8)
        self._needed = min(ceiling, max(2 * self.activations, at_least, self._needed))
        return self._needed > self.activations


class _Meter:
    """Bytes of the storages that autograd holds, each counted once; `own` storages (parameters) are not."""

    def __init__(self, own: set[int]) -> None:
        self.limit = 0
        self.saved = 0
        self.high_water = 0
        self.refused = 0  # bytes that would have been saved at the last refusal
        self._own = own
        self._holders: dict[int, int] = {}

    def save(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place in self._own:
            return tensor
        holders = self._holders.get(place, 0)
        if holders == 0:
            size = storage.nbytes()
            if self.saved + size > self.limit:
                self.refused = self.saved + size
                raise OutOfMemory(
                    f"a micro-batch saves {self.refused} bytes for its backward and {self.limit} are granted; the KV "
                    "cache's size (engine.max_total_tokens) is what both share"
                )
            self.saved += size
            self.high_water = max(self.high_water, self.saved)
        self._holders[place] = holders + 1
        return _Saved(tensor, self)

    @staticmethod
    def load(saved: Any) -> torch.Tensor:
        return saved.tensor if isinstance(saved, _Saved) else saved

    def release(self, storage: torch.UntypedStorage) -> None:
        place = storage.data_ptr()
        left = self._holders[place] - 1
        if left:
            self._holders[place] = left
        else:
            del self._holders[place]
            self.saved -= storage.nbytes()


class _Saved:
    """A tensor in autograd's hands; tells the meter when autograd lets it go."""

    __slots__ = ("_meter", "tensor")

    def __init__(self, tensor: torch.Tensor, meter: _Meter) -> None:
        self.tensor = tensor
        self._meter = meter

    def __del__(self) -> None:
        self._meter.release(self.tensor.untyped_storage())
