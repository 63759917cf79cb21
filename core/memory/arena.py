"""The arena: one pool of physical pages that KV cache and finetuning map into address ranges of their own.

The pool, its regions and its accounting are native (`native/`). On a GPU the pages are the driver's allocations,
elsewhere pieces of an anonymous file, with the same semantics. What lies here puts tensors over regions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch

from core.errors import Unavailable
from core.memory._arena import (
    Arena,
    ArenaError,
    ArenaFull,
    Claim,
    Region,
    Statistics,
    cuda_arena,
    map_all,
    memfd_arena,
    unmap_all,
)

__all__ = [
    "Arena", "ArenaError", "ArenaFull", "Claim", "OutOfMemory", "Region", "Statistics", "map_all", "open_arena",
    "out_of_memory", "page_bytes", "pages_of", "unmap_all", "view",
]  # fmt: skip

# Models that run on a CPU are small: with pages as large as a GPU's, their KV cache would be a handful of them.
CPU_PAGE_BYTES = 256 * 1024
# The driver takes its time by the page, whatever its size: on an H200 33 us to map one and open it to the GPU, 25 us to
# take it away. Thousands of its smallest, 2 MiB, would keep a burst waiting for more than 100 ms, where they have not
# been before; pages as large as these are a small part of a large GPU's memory, and on small ones pages are smaller.
GPU_PAGE_BYTES = 2**21, 2**24
_GPU_PAGES = 8192  # of all its memory


class OutOfMemory(torch.OutOfMemoryError):
    """The arena has no page left for a finetune job; an ordinary out-of-memory error to whatever runs the job."""


def page_bytes(device: torch.device) -> int:
    """Bytes of a page of the device's arena."""
    if device.type != "cuda":
        return CPU_PAGE_BYTES
    least, most = GPU_PAGE_BYTES
    total = torch.cuda.get_device_properties(device).total_memory if torch.cuda.is_available() else 0
    return max(least, min(most, int(2 ** ((total // _GPU_PAGES).bit_length() - 1))))


def open_arena(device: torch.device, capacity_bytes: int, page: int | None = None) -> Arena:
    """An arena of at most `capacity_bytes` of the device's memory, in whole pages of `page` bytes: a multiple of the
    driver's granularity; None: `page_bytes`.

    Raises `Unavailable` with the driver's words where it has no virtual memory management.
    """
    try:
        page = page or page_bytes(device)
        if device.type == "cuda":
            return cuda_arena(device.index or 0, capacity_bytes, page)
        return memfd_arena(page, capacity_bytes // page)
    except ArenaError as error:
        raise Unavailable(
            "no_arena",
            f"memory of {device} cannot be mapped page by page ({error}); set HARLI_ENGINE__ELASTIC_KV=false",
            "engine.elastic_kv",
        ) from error


def view(arena: Arena, region: Region, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
    """A tensor over a region's addresses from byte `offset` on; it keeps the region alive.

    Its elements may be touched where pages are mapped; elsewhere a CPU ends the process and a GPU the context.
    """
    flat = region.bytes(offset, prod(shape) * dtype.itemsize, arena.device_id)
    return flat.view(dtype).view(shape)


def pages_of(arena: Arena, size: int) -> int:
    """Pages that hold `size` bytes."""
    return -(-size // arena.page_bytes)


@contextmanager
def out_of_memory() -> Iterator[None]:
    """Around what takes pages for a job: a full arena is an `OutOfMemory`."""
    try:
        yield
    except ArenaFull as error:
        raise OutOfMemory(str(error)) from error
