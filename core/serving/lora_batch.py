"""How far SGLang's LoRA kernels (csgmv, 0.5.16) reach in a captured decode graph.

They work on segments of up to 16 tokens of one adapter. A captured graph launches as many blocks as there could be
segments in the largest batch that has a graph, one a request, in every matrix of every layer; nearly all of them find
nothing to do, and yet take their time. How many there can be in the batch that is captured is known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

TARGET = "sglang.srt.lora.backend.chunked_backend.ChunkedSgmvLoRABackend.prepare_lora_batch"
_SEGMENT = 16  # tokens; SGLang's MIN_CHUNK_SIZE


def most_segments(tokens: int, adapters: int) -> int:
    """Segments that a decode batch of so many tokens can have: the full ones, and of each adapter one that is not."""
    return min(tokens, tokens // _SEGMENT + adapters)


def prepare_lora_batch(
    original: Callable[..., None], backend: Any, forward_batch: Any, *more: Any, **named: Any
) -> None:
    """Hook around SGLang's: the kernels see only the segments that this batch can have."""
    original(backend, forward_batch, *more, **named)
    info = backend.batch_info
    if info.use_cuda_graph:
        most = most_segments(forward_batch.batch_size, backend.max_loras_per_batch)
        backend.batch_info = dataclasses.replace(info, weight_indices=info.weight_indices[:most])
