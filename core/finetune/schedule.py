"""Learning-rate schedules: linear warm-up, then cosine or linear decay to zero, or constant."""

from __future__ import annotations

import math
from typing import Literal

Kind = Literal["cosine", "linear", "constant"]


def factor(kind: Kind, step: int, total_steps: int, warmup_steps: int) -> float:
    """The share of the peak learning rate for optimizer step `step` (0-based) of `total_steps`.

    As `transformers.get_scheduler`, but the warm-up starts above zero: a short job has no step to give away.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if kind == "constant":
        return 1.0
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    if kind == "linear":
        return max(0.0, 1.0 - progress)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
