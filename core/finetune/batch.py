"""A packed micro-batch as tensors on the training device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from core.intake.packing import MicroBatch


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """ids, positions: int64 [1, T]. mask: bool [1, 1, T, T], True where a token may attend: earlier or itself, within
    its own row (padding attends to padding, so that no softmax is empty). trained: int64 [N], the positions whose next
    token counts; targets: int64 [N], that token. tokens: T without padding."""

    ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    trained: torch.Tensor
    targets: torch.Tensor
    tokens: int

    @classmethod
    def of(cls, batch: MicroBatch, device: torch.device) -> PackedBatch:
        """Copy a NumPy micro-batch to `device`."""
        segments = torch.from_numpy(np.ascontiguousarray(batch.segments)).to(device)
        labels = torch.from_numpy(np.ascontiguousarray(batch.labels)).to(device)
        length = segments.numel()
        causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        trained = (labels >= 0).nonzero().squeeze(1)
        return cls(
            ids=torch.from_numpy(np.ascontiguousarray(batch.ids)).to(device)[None],
            positions=torch.from_numpy(np.ascontiguousarray(batch.positions)).to(device)[None],
            mask=(causal & (segments[:, None] == segments[None, :]))[None, None],
            trained=trained,
            targets=labels[trained],
            tokens=batch.tokens,
        )
