"""Where the static buffers of a captured program lie: on the arena, so that their pages go to the KV cache while no job
uses them, and their addresses stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from core.memory.arena import Arena
from core.memory.rate import Rate
from core.memory.share import StaticActivations
from core.memory.swap import Scratch, Swappable, paced

# As jobs are named among the arena's owners, since whatever job there is lives in it.
OWNER = "job slot"


class Place(Protocol):
    """What makes static buffers, zero at first."""

    def kept(self, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        """fp32 tensors whose content outlives a micro-batch; asked for once."""

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor that a micro-batch begins with as zero, or fills itself."""


class TorchMemory:
    """Torch's own memory of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def kept(self, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        return [torch.zeros(shape, dtype=torch.float32, device=self._device) for shape in shapes]

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)


class SlotMemory:
    """One slot's part of the arena: `state`, which `kept` makes and which can be swapped, and `activations`, all other
    buffers, which are dropped. Nothing is mapped at first. make_room: sees to it, at the start, that so many pages of
    the arena are free."""

    state: Swappable

    def __init__(self, arena: Arena, make_room: Callable[[int], None]) -> None:
        self._arena, self._make_room = arena, make_room
        self._scratch = Scratch(arena, OWNER)
        self.activations = StaticActivations(self._scratch)

    def kept(self, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        self.state = Swappable(self._arena, OWNER, [(shape, torch.float32) for shape in shapes])
        return self.state.tensors

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._scratch.take(shape, dtype)

    @property
    def pages(self) -> int:
        """Of all of it."""
        return self.state.pages + self._scratch.pages

    @property
    def bytes(self) -> int:
        return self.pages * self._arena.page_bytes

    @property
    def present(self) -> bool:
        """All of it is there."""
        return self.state.inside and self._scratch.mapped == self._scratch.pages

    @property
    def mappings(self) -> int:
        """How often the buffers were mapped, and thereby made zero."""
        return self._scratch.mappings

    def map(self) -> None:
        """Put pages behind all of it, now: for the capture. Raises `ArenaFull`."""
        self._make_room(self.pages)
        self.state.lock_pages()
        paced(self.state.back(), Rate())
        self._scratch.map()

    def unmap(self) -> None:
        """Give all of it back and forget its content; nothing uses it any more."""
        self._scratch.unmap()
        self.state.forget()
