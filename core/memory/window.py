"""Frozen weights of a model that is not on the device as a whole: its layers go through a window of slots.

Layer i is computed with in slot i modulo their number. Slots keep their addresses, so that whatever was built over them
(a model's parameters, captured graphs) finds in them whichever layer is due. The order in which a program needs layers
is known, so that each slot is filled with the next one of its own as soon as the last has been computed with: forward
in order, backward in reverse order, and the last layers of a forward stay for the backward that follows. What belongs
to no layer (embedding, head) has a place of its own, and stays.

On a GPU copies run on a stream of their own, from page-locked memory; what computes with a slot and what fills it wait
for each other by events. On a CPU a copy is over when it returns.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from core.errors import Unavailable
from core.memory.arena import ArenaFull
from core.memory.moment import Mark, Moment, Passed
from core.memory.rate import Rate
from core.memory.share import GrowingActivations
from core.memory.swap import ALIGN, Scratch, Shapes

PIECE_BYTES = 16 * 2**20  # of a layer that are copied at once, where there is a rate
# What the rate gives for so long may be copied at once: nobody asks for more between two decode steps.
_BURST_S = 0.02
_NO_LAYER = -1
# Memory is locked by pages of this size.
_PAGE = 4096


class Copies(Protocol):
    """Where copies are queued, one after another."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None: ...

    def mark(self) -> Mark:
        """When what was queued so far is over."""

    def after(self, moment: Moment) -> None:
        """What is queued from now on does not begin before that."""


class _Direct:
    """Copies of a CPU."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def mark(self) -> Mark:
        return Passed()

    def after(self, moment: Moment) -> None:
        pass


class _OnStream:
    """Copies of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        moment: torch.cuda.Event = self._stream.record_event()
        return moment

    def after(self, moment: Moment) -> None:
        self._stream.wait_event(moment)  # type: ignore[arg-type]


# ---- blocks ----------------------------------------------------------------------------------------------------------


class Block(NamedTuple):
    """How tensors lie in a block of bytes: (first byte, shape, dtype) of each."""

    parts: tuple[tuple[int, tuple[int, ...], torch.dtype], ...]
    bytes: int

    @classmethod
    def of(cls, shapes: Shapes) -> Block:
        parts, end = [], 0
        for shape, dtype in shapes:
            parts.append((end, tuple(shape), dtype))
            end += -(-torch.Size(shape).numel() * dtype.itemsize // ALIGN) * ALIGN
        return cls(tuple(parts), max(end, ALIGN))

    def tensors(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of `flat`, uint8 [bytes]."""
        return [
            flat[at : at + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)
            for at, shape, dtype in self.parts
        ]


class HostWeights:
    """All blocks of a model in host memory, uint8: `layers` and `fixed`. `lock` and `close` belong to whoever made it,
    and may run in any thread."""

    def __init__(self, layers: int, layer: Block, fixed: Block) -> None:
        sizes = [-(-size // _PAGE) * _PAGE for size in [layer.bytes] * layers + [fixed.bytes]]
        self.bytes = sum(sizes)
        with torch.inference_mode(False):
            whole = torch.empty(self.bytes + _PAGE, dtype=torch.uint8)
            # No two blocks share a page, so that each can be locked by itself.
            blocks = list(torch.split(whole[-whole.data_ptr() % _PAGE :][: self.bytes], sizes))
        self.layers, self.fixed = blocks[:layers], blocks[layers]
        self._locked: list[torch.Tensor] = []

    def lock(self, device: torch.device) -> None:
        """Page-lock it for a GPU. Raises `Unavailable` with the driver's words; nothing is locked then."""
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):  # whose context it is locked for
            for one in [*self.layers, self.fixed]:
                error = runtime.cudaHostRegister(one.data_ptr(), one.numel(), 0)
                if int(error) != 0:
                    self.close()
                    raise Unavailable(
                        "host_memory",
                        f"{self.bytes / 2**30:.1f} GiB of host memory for a base model cannot be page-locked "
                        f"({runtime.cudaGetErrorString(error)}); raise the limit on locked memory "
                        "(ulimit -l), or use a smaller base",
                        "base_model",
                    )
                self._locked.append(one)

    def close(self) -> None:
        """Give it back; no copy reads it any more."""
        for one in self._locked:
            torch.cuda.cudart().cudaHostUnregister(one.data_ptr())  # type: ignore[no-untyped-call]
        self._locked.clear()
        self.layers, self.fixed = [], torch.empty(0, dtype=torch.uint8)


# ---- the window ------------------------------------------------------------------------------------------------------


class LayerWindow:
    """`slots` slots for `layers` layers of tensors of the shapes `layer`, and a place for those of `fixed`.

    new: makes the memory of a slot; mappings: how often that was mapped so far, and its content lost. `source`: what is
    copied from, while there is a job. Belongs to one thread at a time. One program after another is announced by
    `follow`; for each layer that it names, in order, `enter` and `leave` surround what is queued to compute with it.
    Nothing is copied before the first `feed`, or `enter`, from when on the slots' memory has to be there until `stop`.
    """

    def __init__(
        self,
        layers: int,
        layer: Shapes,
        fixed: Shapes,
        slots: int,
        new: Callable[[tuple[int, ...], torch.dtype], torch.Tensor],
        *,
        device: torch.device,
        rate: Rate = Rate(),
        mappings: Callable[[], int] = lambda: 0,
        copies: Copies | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not 1 <= slots <= layers:
            raise ValueError(f"a window of {slots} slots for {layers} layers; give 1 to {layers}")
        self.layers, self.slots = layers, slots
        self.layer, self.fixed = Block.of(layer), Block.of(fixed)
        self.bytes = slots * self.layer.bytes + self.fixed.bytes
        self.source: HostWeights | None = None
        with torch.inference_mode(False):
            flats = [new((self.layer.bytes,), torch.uint8) for _ in range(slots)]
            flats.append(new((self.fixed.bytes,), torch.uint8))
            self.slot_tensors = [self.layer.tensors(flat) for flat in flats[:slots]]
            self.fixed_tensors = self.fixed.tensors(flats[slots])
            # Autograd watches tensors that it has saved for writes to them. What is written here has been put back to
            # what it was by the time a backward reads it, so that it is written where autograd does not look.
            self._flats = [flat.data for flat in flats]
        self._copies = copies or (_OnStream(device) if device.type == "cuda" else _Direct())
        self._rate, self._clock = rate, clock
        self._mappings, self._mapping = mappings, -1
        self._due = 0.0  # when the rate allows the next copy
        self._order: Sequence[int] = ()
        self._following: list[int] = []  # for each place in it, the layer that its slot is to have next
        self._at = 0
        # Of each slot, and behind them of what belongs to no layer: what it has, or is about to have; when all of that
        # is there, None as long as some of its copy is not queued; when the last that computes with it is over.
        self._has: list[int | None] = [None] * (slots + 1)
        self._there: list[Mark | None] = [None] * (slots + 1)
        self._seen = [False] * (slots + 1)  # that it is there
        made = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        self._used: list[Moment | None] = [made] * (slots + 1)
        self._pending: deque[tuple[int, int]] = deque()  # (slot, first byte) of copies to come

    def tensors(self, layer: int) -> list[torch.Tensor]:
        """Where a layer's tensors are when it is computed with."""
        return self.slot_tensors[layer % self.slots]

    # ---- programs ----------------------------------------------------------------------------------------------------

    def follow(self, order: Sequence[int]) -> None:
        """Layers are needed in this order from now on, and then from the first one again. What was announced before
        and not come to is given up."""
        self._order, self._at = order, 0
        upcoming = list(range(self.slots))
        following = []
        for layer in reversed(order):
            following.append(upcoming[layer % self.slots])
            upcoming[layer % self.slots] = layer
        self._following = following[::-1]
        self._give_up_pending()
        if self._has[self.slots] is None:
            self._want(self.slots, _NO_LAYER)
        for slot, layer in enumerate(upcoming):
            self._want(slot, layer)

    def feed(self) -> None:
        """Queue the copies that are due, as far as the rate allows."""
        if self._mapping != self._mappings():
            self._mapping = self._mappings()
            self._has = [None] * (self.slots + 1)
            order, self._order = self._order[self._at :], ()
            self.follow(order)
        now = self._clock()
        self._due = max(self._due, now - _BURST_S)
        while self._pending and self._due <= now:
            self._copy(*self._pending.popleft())

    def there(self, most: int) -> int:
        """How many of the layers that come next, of at most `most`, may be computed with now."""
        if not self._is_there(self.slots):
            return 0
        count = 0
        for layer in self._order[self._at : self._at + most]:
            slot = layer % self.slots
            if self._has[slot] != layer or not self._is_there(slot):
                break
            count += 1
        return count

    def enter(self, stream: Any = None) -> None:
        """What is queued on `stream` next computes with the layer that is due, once that is there. The whole of its
        copy has to be queued."""
        for slot in (self._order[self._at] % self.slots, self.slots):
            there = self._there[slot]
            if there is None:
                raise RuntimeError(f"layer {self._order[self._at]} is computed with before all of its copy is queued")
            if stream is not None:
                stream.wait_event(there)

    def leave(self, stream: Any = None) -> None:
        """What computes with that layer is queued: its slot is for the next one."""
        slot = self._order[self._at] % self.slots
        if stream is not None:
            self._used[slot] = stream.record_event()
        self._want(slot, self._following[self._at])
        self._at += 1
        self.feed()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """`enter` and `leave` around what computes with the next layer on the current stream; waits until it is
        there."""
        self.feed()
        while not self.there(1):
            time.sleep(0.0005)
            self.feed()
        stream = None if self._flats[0].device.type == "cpu" else torch.cuda.current_stream(self._flats[0].device)
        self.enter(stream)
        try:
            yield
        finally:
            self.leave(stream)

    def stop(self) -> Moment:
        """Queue no further copy; answers when those that are queued are over. `follow` goes on."""
        self._order, self._following, self._at = (), [], 0
        self._give_up_pending()
        return self._copies.mark()

    # ---- copies ------------------------------------------------------------------------------------------------------

    def _want(self, slot: int, layer: int) -> None:
        if self._has[slot] != layer:
            self._has[slot], self._there[slot], self._seen[slot] = layer, None, False
            self._pending.append((slot, 0))

    def _give_up_pending(self) -> None:
        for slot, _ in self._pending:
            self._has[slot] = None
        self._pending.clear()

    def _copy(self, slot: int, first: int) -> None:
        layer, target = self._has[slot], self._flats[slot]
        assert self.source is not None and layer is not None
        source = self.source.fixed if slot == self.slots else self.source.layers[layer]
        # At a rate in pieces, between which it may be left off.
        end = len(target) if self._rate.bytes_s is None else min(len(target), first + PIECE_BYTES)
        used = self._used[slot]
        if first == 0 and used is not None:
            self._copies.after(used)
        self._copies.copy(target[first:end], source[first:end])
        if self._rate.bytes_s is not None:
            self._due += (end - first) / self._rate.bytes_s
        if end < len(target):
            self._pending.appendleft((slot, end))
        else:
            self._there[slot] = self._copies.mark()

    def _is_there(self, slot: int) -> bool:
        there = self._there[slot]
        if not self._seen[slot] and there is not None:
            self._seen[slot] = there.query()
        return self._seen[slot]


class WindowedActivations:
    """Those of a job whose frozen weights go through a window, which lies in `frozen`: that is dropped with them, since
    host memory has it all. `growing`: the others."""

    def __init__(self, frozen: Scratch, growing: GrowingActivations) -> None:
        self._frozen, self._growing = frozen, growing

    @property
    def held(self) -> int:
        return self._frozen.mapped + self._growing.held

    @property
    def promised(self) -> int:
        return self._growing.promised

    @property
    def needed(self) -> int:
        return self._frozen.pages + max(self._growing.needed, self._growing.held)

    def grant(self, pages: int) -> None:
        missing = self._frozen.pages - self._frozen.mapped
        if missing:
            self._frozen.map()
        try:
            self._growing.grant(pages - missing)
        except ArenaFull:
            if missing:
                self._frozen.unmap()
            raise

    def give_up(self) -> None:
        self._frozen.unmap()
        self._growing.give_up()

    def computing(self) -> AbstractContextManager[None]:
        return self._growing.computing()

    def ask(self) -> bool:
        return self._growing.ask()
