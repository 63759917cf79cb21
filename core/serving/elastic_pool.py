"""SGLang's KV pool on the arena, and a slot allocator whose size can move while requests run.

The pool's tensors lie over reserved addresses at their full size, so nothing that holds them, a captured decode graph
least of all, notices rows coming and going. The allocator alone decides which slots are in use. Subclasses of SGLang's
own (0.5.16); `pool`, `require` and
`allocator` say what they stand in for; everything else is refused by its name.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from core.errors import Unavailable
from core.memory.arena import open_arena, page_bytes
from core.memory.rows import Rows

OWNER = "kv cache"


class ElasticMHATokenToKVPool(MHATokenToKVPool):  # type: ignore[misc]
    """K and V of each layer as columns of one `Rows`; all rows are mapped at first.

    The arena is as large as the full pool: what finetuning gets is what the pool gives up.
    """

    rows: Rows
    page_size: int

    def _create_buffers_normal(self) -> None:
        if self.kv_cache_layout != "nhd":
            raise refused(f"a KV pool in layout {self.kv_cache_layout}")
        shapes = self._kv_buffer_shapes()
        token_bytes = [prod(shape[1:]) * self.store_dtype.itemsize for shape in shapes for _ in range(self.layer_num)]
        tokens = self.size + self.page_size
        device = torch.device(self.device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        page = page_bytes(device)
        capacity = sum(-(-size * tokens // page) for size in token_bytes) * page
        self.rows = Rows(open_arena(device, capacity), OWNER, token_bytes, tokens)
        self.rows.resize(self.rows.most)
        buffers = [
            self.rows.tensor(column, shapes[column // self.layer_num], self.store_dtype)
            for column in range(2 * self.layer_num)
        ]
        for buffer in buffers:
            buffer[: self.page_size].zero_()  # padded tokens are read from and written to the first slot
        self.k_buffer, self.v_buffer = buffers[: self.layer_num], buffers[self.layer_num :]


class ElasticTokenAllocator(TokenToKVPoolAllocator):  # type: ignore[misc]
    """Hands out slots 1 to `size`, where `size` may move below the pool's own at any moment between two batches.

    Slots above it that are still held are `excess`. They count as taken from what is available, which may thereby fall
    below zero; then nothing is handed out until enough is given back. So to all of SGLang, which compares what it needs
    with what is available plus what it could evict, the pool simply has `size` slots, and its own eviction and
    retraction bring the requests within them. A slot above `size` that is given back is not handed out again.
    """

    excess: int
    size: int
    free_pages: torch.Tensor
    release_pages: torch.Tensor

    def clear(self) -> None:
        """Nothing is held: SGLang's start and its flush of the cache."""
        super().clear()
        self._held_above = torch.zeros(self._kvcache.size + 1, dtype=torch.bool, device=self.device)
        self.excess = 0

    def set_size(self, size: int) -> None:
        """From now on hand out slots up to `size` (1 to the pool's size)."""
        free = torch.cat((self.free_pages, self.release_pages))
        if size < self.size:
            self._held_above[size + 1 : self.size + 1] = True
            self._held_above[free] = False
            free = free[free <= size]
        else:
            fresh = torch.arange(self.size + 1, size + 1, dtype=free.dtype, device=self.device)
            free = torch.cat((free, fresh[~self._held_above[fresh]]))
            self._held_above[: size + 1] = False
        self.free_pages, self.release_pages = free, free[:0]
        self.size = size
        self.excess = int(self._held_above.sum())

    def available_size(self) -> int:
        return int(super().available_size()) - self.excess

    def alloc(self, need_size: int) -> torch.Tensor | None:
        if need_size > self.available_size():
            return None
        slots: torch.Tensor | None = super().alloc(need_size)
        return slots

    def free(self, free_index: torch.Tensor) -> None:
        if self.excess and self.is_not_in_free_group and free_index.numel():
            above = free_index > self.size
            self._held_above[free_index[above]] = False
            self.excess = int(self._held_above.sum())
            free_index = free_index[~above]
        super().free(free_index)

    def relocate(self, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """At most `most` held slots above the size, and as many free ones below it in their place: from now on those
        are held, and the caller makes it true."""
        if self.need_sort:
            self.merge_and_sort_free()
        count = min(most, self.excess, len(self.free_pages))
        source = self._held_above.nonzero().flatten()[:count]
        target, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        self._held_above[source] = False
        self.excess -= count
        return source, target


def pool(configurator: Any, mha_pool_class: type, quant_method: Any) -> type[MHATokenToKVPool]:
    """The class to build instead of SGLang's `mha_pool_class`. Raises `Unavailable` when there is none for it."""
    if mha_pool_class is not MHATokenToKVPool:
        raise refused(f"the KV pool {mha_pool_class.__name__}")
    arguments = configurator.server_args
    for wanted, name in (
        (quant_method is not None, f"a KV cache quantised to {configurator.kv_cache_dtype}"),
        (arguments.kv_cache_dtype == "mxfp8", "the KV pool MHATokenToKVPoolMXFP8"),
        (arguments.prefill_only_disable_kv_cache, "the KV pool NoOpMHATokenToKVPool"),
        (configurator.post_capture_kv_active, "SGLang's own backing of the KV pool after capture"),
        (arguments.enable_memory_saver, "enable_memory_saver"),
        (arguments.speculative_algorithm is not None, f"speculative decoding ({arguments.speculative_algorithm})"),
        (arguments.disaggregation_mode != "null", f"disaggregation mode {arguments.disaggregation_mode}"),
        (arguments.enable_hierarchical_cache, "a hierarchical cache"),
    ):
        if wanted:
            raise refused(name)
    return ElasticMHATokenToKVPool


def require(kv_pool: Any) -> None:
    """Raise `Unavailable`, naming it, for a pool that is not elastic."""
    if not isinstance(kv_pool, ElasticMHATokenToKVPool):
        raise refused(f"the KV pool {type(kv_pool).__name__}")


def allocator(made: Any) -> ElasticTokenAllocator:
    """The allocator to use instead of `made`. Raises `Unavailable` when there is none for it."""
    if type(made) is not TokenToKVPoolAllocator:
        raise refused(f"the slot allocator {type(made).__name__} (pages of {made.page_size} tokens)")
    return ElasticTokenAllocator(made.size, made.dtype, made.device, made.get_kvcache(), made.need_sort)


def refused(what: str) -> Unavailable:
    """What the elastic KV cache has no counterpart for."""
    return Unavailable(
        "elastic_kv",
        f"the KV cache cannot be elastic with {what}; set HARLI_ENGINE__ELASTIC_KV=false or change SGLang's arguments",
        "engine.elastic_kv",
    )
