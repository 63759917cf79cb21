"""What SGLang's csgmv backend (0.5.16) tells the LoRA kernels about a decode batch that a captured graph runs.

The kernels work on segments of up to 16 tokens of one adapter. A captured graph launches as many blocks as there could
be segments in the largest batch that has a graph, one a request, in every matrix of every layer; nearly all of them
find nothing to do, and yet take their time. How many there can be in the batch that is captured is known.

SGLang sorts the requests by adapter and copies ten small tensors to the GPU before every step. From one decode step to
the next most often nothing of it has changed, and what is there already is left alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

TARGET = "sglang.srt.lora.backend.chunked_backend.ChunkedSgmvLoRABackend.prepare_lora_batch"
SEGMENT = 16  # tokens; SGLang's MIN_CHUNK_SIZE


def most_segments(tokens: int, adapters: int) -> int:
    """Segments that a decode batch of so many tokens can have: the full ones, and of each adapter one that is not."""
    return min(tokens, tokens // SEGMENT + adapters)


def prepare_lora_batch(
    original: Callable[..., None], backend: Any, forward_batch: Any, weight_indices: Sequence[int],
    lora_ranks: Sequence[int], scalings: Sequence[float], use_cuda_graph: bool,
) -> None:  # fmt: skip
    """Hook around SGLang's. weight_indices: each request's slot; lora_ranks, scalings: of each slot."""
    tokens = forward_batch.batch_size
    told = (tokens, tuple(weight_indices), tuple(lora_ranks), tuple(scalings))
    # A graph's batches share one set of tensors, which nothing else writes; other batches have tensors of their own.
    if use_cuda_graph and getattr(backend, "harli_told", None) == told:
        backend.batch_info = backend.harli_batch_info
        backend.lm_head_batch_info = backend.lm_head_pass_batch_infos = None  # which are for prefill
        return
    original(
        backend, forward_batch=forward_batch, weight_indices=weight_indices, lora_ranks=lora_ranks, scalings=scalings,
        use_cuda_graph=use_cuda_graph,
    )  # fmt: skip
    if use_cuda_graph:
        most = most_segments(tokens, backend.max_loras_per_batch)
        info = backend.batch_info
        backend.batch_info = dataclasses.replace(info, weight_indices=info.weight_indices[:most])
        backend.harli_told, backend.harli_batch_info = told, backend.batch_info
