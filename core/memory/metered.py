"""Activations that torch allocates on a CPU: what autograd saves between forward and backward is counted, tensor by
tensor, and never passes what was granted, which is claimed of the arena before it is used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from core.memory.arena import Arena, OutOfMemory, pages_of


def more(granted: int, refused: int, needed: int, ceiling: int) -> int:
    """Pages to need after `granted` did not do for a micro-batch that was refused `refused`: twice as many, between an
    eighth of all that a job can get and all of it. Each time the micro-batch has run for nothing: a few large steps
    rather than many small ones."""
    return min(ceiling, max(2 * granted, refused, ceiling // 8, needed))


def beyond(ceiling_bytes: int) -> str:
    """What to do about a micro-batch that a job cannot have the memory for."""
    return (
        f"a job can have {ceiling_bytes / 2**20:.0f} MiB for its activations, three quarters of the KV cache's memory "
        "less its own state and the window of a base of its own; lower micro_batch_tokens, or start the engine with a "
        "larger engine.max_total_tokens"
    )


class MeteredActivations:
    """At most `ceiling` pages of `owner`; `shared`: parameters, which autograd saves too and which do not count."""

    def __init__(self, arena: Arena, owner: str, ceiling: int, *, shared: Iterable[torch.Tensor]) -> None:
        self._arena, self._ceiling = arena, ceiling
        self._claim = arena.claim(owner, 0)
        self._needed = 0
        self._meter = _Meter({tensor.untyped_storage().data_ptr() for tensor in shared})

    @property
    def held(self) -> int:
        return self._claim.pages

    @property
    def promised(self) -> int:
        return 0  # a claim is taken when it is granted

    @property
    def needed(self) -> int:
        return self._needed

    @property
    def high_water_bytes(self) -> int:
        """The most that was ever saved at once."""
        return self._meter.high_water

    def grant(self, pages: int) -> None:
        self._claim.resize(self._claim.pages + pages)

    def give_up(self) -> None:
        self._claim.resize(0)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """See `core.memory.share.GrowingActivations`."""
        self._meter.limit = self.held * self._arena.page_bytes
        self._meter.ceiling = self._ceiling * self._arena.page_bytes
        with torch.autograd.graph.saved_tensors_hooks(self._meter.save, self._meter.load):
            yield

    def ask(self) -> bool:
        """See `core.memory.share.GrowingActivations`."""
        self._needed = more(self.held, pages_of(self._arena, self._meter.refused), self._needed, self._ceiling)
        return self._needed > self.held


class _Meter:
    """Bytes of the storages that autograd holds, each counted once; `own` storages (parameters) are not."""

    def __init__(self, own: set[int]) -> None:
        self.limit = 0
        self.ceiling = 0
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
                    f"a micro-batch saves {self.refused} bytes for its backward and {self.limit} are granted; "
                    + beyond(self.ceiling)
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
