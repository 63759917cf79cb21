"""One way to share a device between decode and finetuning, with the streams that keep each to its SMs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from core.policy.types import WHOLE, Layout


@dataclass(frozen=True, slots=True)
class Part:
    """Streams of one layout. Work launched, or a CUDA graph captured, on `decode` and `finetune` stays on the SMs that
    the layout gives to each. decode None: decode keeps the stream (and the graphs) that the engine made itself.
    """

    layout: Layout
    decode: Any
    finetune: Any


@dataclass(frozen=True, slots=True)
class Partitions:
    """Every layout that exists, ``whole`` first; `sms` of the device, 0 where it has none (a CPU)."""

    sms: int
    parts: tuple[Part, ...]

    @property
    def layouts(self) -> tuple[Layout, ...]:
        return tuple(part.layout for part in self.parts)

    def of(self, layout: Layout) -> Part:
        """The part of a layout. Raises KeyError for one that was not made."""
        for part in self.parts:
            if part.layout == layout:
                return part
        raise KeyError(layout)


def whole_device(sms: int = 0, finetune: Any = None) -> Partitions:
    """No split: the only layout where green contexts cannot be had."""
    return Partitions(sms, (Part(WHOLE, None, finetune),))
