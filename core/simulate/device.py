"""A simulated device: how long a decode step takes in a layout, alone or beside finetuning, and how fast that goes."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from core.errors import Invalid
from core.policy.types import Layout, TaskletKind
from core.simulate.profile import DeviceProfile, LayoutProfile, Surface, TaskletProfile

_BIN = 1024  # KV tokens between two tabulated points; between them durations are linear
_NEAREST = 1e-3  # in octaves: closer than this a point is taken as it is
_POWER = 3.0  # of the distance: chosen by leaving each measured point out in turn
PAGE_BYTES = 2 << 20
HEAD_PARTS = 3  # tasklets of the loss, and of its gradient, so that none is longer than a layer's
KV_BLOCK_TOKENS = 1024


class Cell(NamedTuple):
    """A decode step of one size in one layout: ms alone and beside finetuning, the spreads (p99/p50 − 1) of both, and
    the speed of finetuning next to it (1: the whole device)."""

    alone_ms: float
    beside_ms: float
    alone_tail: float
    beside_tail: float
    speed: float


def evaluate(
    surface: Surface, batch: NDArray[np.float64], kv_tokens: NDArray[np.float64], longest: float = 0.0
) -> NDArray[np.float64]:
    """The surface at each batch and KV tokens, these being at least `longest` times the longest request already.
    Between measured points the measured ÷ computed ratio is averaged with weights that fall with the third power of
    the distance in octaves of batch and of context, the context being that of requests which are all alike."""
    plane = surface.base + surface.per_request * batch + surface.per_kv_token * kv_tokens
    if not surface.points:
        return plane
    points = np.array(surface.points)
    context = np.maximum(kv_tokens / np.maximum(batch, longest), 1.0)
    octaves = np.hypot(
        np.log2(batch)[:, None] - np.log2(points[:, 0]), np.log2(context)[:, None] - np.log2(points[:, 1])
    )
    weights = np.maximum(octaves, _NEAREST) ** -_POWER
    factors: NDArray[np.float64] = weights @ points[:, 2] / weights.sum(axis=1)
    return plane * factors


class Device:
    """Look-ups over a profile, tabulated per (layout, captured batch size) when first asked for."""

    def __init__(self, profile: DeviceProfile) -> None:
        self.profile = profile
        self.layouts: tuple[Layout, ...] = tuple(part.layout for part in profile.layouts)
        if Layout() not in self.layouts:
            raise Invalid("device_profile", f"{profile.device}: no layout 'whole'; make the profile again", "device")
        self._parts: dict[Layout, LayoutProfile] = {part.layout: part for part in profile.layouts}
        self._captured = profile.captured
        self._tables: dict[tuple[Layout, int], list[Cell]] = {}
        self._longest = {part.layout: part.longest for part in profile.layouts}
        self._kv_max = profile.arena_pages * PAGE_BYTES // profile.kv_bytes_per_token
        self.pages_per_block = -(-KV_BLOCK_TOKENS * profile.kv_bytes_per_token // PAGE_BYTES)

    @property
    def kv_tokens(self) -> int:
        """KV tokens that the whole arena can hold."""
        return self.profile.arena_pages // self.pages_per_block * KV_BLOCK_TOKENS

    def padded(self, batch: int) -> int:
        """The captured batch size that a batch runs as."""
        return self._captured[bisect_left(self._captured, batch)]

    @property
    def max_batch(self) -> int:
        return self._captured[-1]

    def cell(self, layout: Layout, padded: int, kv_tokens: int, max_kv: int) -> Cell:
        """A decode step of `padded` requests with `kv_tokens` in all, the longest of them `max_kv`."""
        table = self._tables.get((layout, padded))
        if table is None:
            table = self._tables[layout, padded] = self._tabulate(layout, padded)
        tokens = max(kv_tokens, max_kv * self._longest[layout])
        at = min(int(tokens) // _BIN, len(table) - 2)
        low, high = table[at], table[at + 1]
        share = tokens / _BIN - at
        return Cell(
            low[0] + (high[0] - low[0]) * share,
            low[1] + (high[1] - low[1]) * share,
            low[2],
            low[3],
            low[4],
        )

    def step(self, start_ms: float, layout: Layout, padded: int, kv_tokens: int, max_kv: int) -> Cell:
        """The `cell` of a step that starts at `start_ms`, which a device that is no steady one may go by."""
        return self.cell(layout, padded, kv_tokens, max_kv)

    def alone_speed(self, layout: Layout) -> float:
        """Speed of finetuning on the layout's finetune part (``whole``: the whole device) when no decode step runs."""
        return self._parts[layout].alone_speed

    def sharing(self, layout: Layout) -> tuple[float, float]:
        """Speeds of two micro-batches at once, one on the whole device and one on the layout's finetune part."""
        return self._parts[layout].sharing or (1.0, 1.0)

    def prefill_ms(self, tokens: int, context: int) -> float:
        """Prefill of `tokens` prompt tokens with `context` tokens before them."""
        profile = self.profile
        attended = tokens * (context + tokens / 2)
        return tokens * profile.prefill_ms_per_token + attended * profile.prefill_ms_per_token_and_context

    def noise(self, size: int) -> list[float]:
        """`size` equally likely values of the noise, in order: draw an index uniformly to draw from it."""
        known = np.array(self.profile.noise)
        return [float(x) for x in np.interp((np.arange(size) + 0.5) / size, known[:, 0], known[:, 1])]

    def _tabulate(self, layout: Layout, padded: int) -> list[Cell]:
        part = self._parts[layout]
        kv = np.arange(0, self._kv_max + 2 * _BIN, _BIN, dtype=float)
        kv[0] = min(padded, _BIN)
        batch = np.full_like(kv, padded)

        def values(surface: Surface) -> NDArray[np.float64]:
            return evaluate(surface, batch, kv, part.longest)

        alone, tail = values(part.alone_ms), values(part.alone_tail)
        beside = np.maximum(alone, values(part.beside_ms)) if part.beside_ms else alone
        beside_tail = values(part.beside_tail) if part.beside_tail else tail
        speed = values(part.speed) if part.speed else np.ones_like(kv)
        return [Cell(*map(float, row)) for row in zip(alone, beside, tail, beside_tail, speed, strict=True)]


class Program:
    """The tasklets of a micro-batch, repeated: kinds, ms on the whole device, and running sums of them; and the arena
    pages that its activations take."""

    def __init__(
        self,
        device: Device,
        *,
        layers: int = 1,
        layer_parts: int = 1,
        head_parts: int = 1,
        tokens: int | None = None,
        chunk_tokens: int | None = None,
        slower: float = 1.0,
    ) -> None:
        """layers: how many layers a forward or backward tasklet covers; layer_parts, head_parts: in how many tasklets a
        layer, and each of the loss and its gradient, are cut; tokens: of the micro-batch; chunk_tokens: it goes through
        the model in chunks of that many, forward and backward each; slower: factor over the profile's durations at the
        same tokens (another adapter rank). Errors: `Invalid` for a part, chunk or micro-batch of no tokens."""
        part = device.profile.tasklets
        self.tokens = part.tokens if tokens is None else tokens
        chunk = min(chunk_tokens if chunk_tokens is not None else self.tokens, self.tokens)
        if min(layers, layer_parts, head_parts, chunk) < 1:
            raise Invalid("program", f"program: {chunk} tokens a chunk, {layers} layers; give at least 1", "tokens")
        chunks = max(1, round(self.tokens / chunk))
        scale = slower * _relative_ms(part, self.tokens / chunks)
        kinds: list[TaskletKind] = []
        ms: list[float] = []

        def add(kind: TaskletKind, durations: list[float], parts: int) -> None:
            kinds.extend([kind] * len(durations) * parts)
            ms.extend(scale * duration / parts for duration in durations for _ in range(parts))

        for _ in range(chunks):
            add("forward", _grouped(part.forward_ms, layers), layer_parts)
            add("head", list(part.head_ms), head_parts)
            add("backward", _grouped(part.backward_ms, layers), layer_parts)
        kinds.append("optimizer")
        ms.append(slower * part.optimizer_ms)
        self.kinds = tuple(kinds)
        self.ms = tuple(ms)
        self.total_ms = sum(ms)
        self.activation_pages = ceil(part.activation_pages * self.tokens / chunks / part.tokens)
        self._sums = [0.0, *accumulate(ms)]

    def __len__(self) -> int:
        return len(self.kinds)

    def work_ms(self, start: int, count: int) -> float:
        """ms on the whole device of `count` tasklets from position `start` on, over as many micro-batches as needed."""
        size = len(self.kinds)
        rounds, end = divmod(start + count, size)
        return rounds * self.total_ms + self._sums[end] - self._sums[start]


def _grouped(durations: tuple[float, ...], size: int) -> list[float]:
    return [sum(durations[at : at + size]) for at in range(0, len(durations), size)]


def _relative_ms(part: TaskletProfile, tokens: float) -> float:
    """ms of a tasklet over `tokens` tokens relative to the profile's."""
    if tokens >= part.tokens or not part.shorter:
        return tokens / part.tokens
    known = sorted({*part.shorter, (float(part.tokens), 1.0)})
    return float(np.interp(tokens, [n for n, _ in known], [share for _, share in known]))
