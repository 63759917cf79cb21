"""Decode steps as columns, the form that fits and tables work on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from core.policy.types import Layout

Array = NDArray[np.float64]
KINDS = ("whole", "split", "confined")


@dataclass(frozen=True)
class Sizes:
    """Decode steps as columns: layout kind (0 whole, 1 split, 2 confined), SMs that decode runs on, share of the SMs
    that finetuning has, whether tasklets run beside, batch, KV tokens, longest request."""

    kind: NDArray[np.int64]
    decode_sms: Array
    share: Array
    beside: NDArray[np.bool_]
    batch: Array
    kv_tokens: Array
    max_kv: Array

    def take(self, index: NDArray[np.int64] | NDArray[np.bool_]) -> Sizes:
        return Sizes(**{name: value[index] for name, value in vars(self).items()})

    def __len__(self) -> int:
        return len(self.batch)


def decode_sms(layout: Layout, sms: int) -> int:
    """SMs that decode runs on."""
    return layout.decode_sms if layout.kind == "split" else sms


def sizes_of(points: Sequence[tuple[Layout, bool, float, float, float]], sms: int) -> Sizes:
    """Columns of (layout, beside, batch, KV tokens, longest request)."""
    layouts = [layout for layout, *_ in points]
    numbers = np.array([point[2:] for point in points], dtype=float).reshape(-1, 3)
    return Sizes(
        kind=np.array([KINDS.index(layout.kind) for layout in layouts]),
        decode_sms=np.array([float(decode_sms(layout, sms)) for layout in layouts]),
        share=np.array([layout.finetune_sms / sms for layout in layouts]),
        beside=np.array([beside for _, beside, *_ in points], dtype=bool),
        batch=numbers[:, 0],
        kv_tokens=numbers[:, 1],
        max_kv=numbers[:, 2],
    )


def queue_tokens(sizes: Sizes, kv_heads: int) -> Array:
    """KV tokens that the busiest SM reads, one block of them per request and KV head. A block goes to the SM that is
    free first, so no SM has more than its share of all and the longest block on top (Graham 1969), nor more than
    ceil(blocks / SMs) of the longest."""
    blocks = sizes.batch * kv_heads
    share = sizes.kv_tokens * kv_heads / sizes.decode_sms
    tokens: Array = np.minimum(np.ceil(blocks / sizes.decode_sms) * sizes.max_kv, share + sizes.max_kv)
    return tokens
