"""Presets of a job by the size of its data set. quick: does the data set do anything? balanced: a sound first run.
thorough: more capacity, a lower rate for longer, evaluated on the way, stopped when it no longer helps.

A small data set is passed over several times; a large one teaches as much in one pass, and a share of it is enough to
look at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from core.api.schemas import JobCreate, Preset

Size = Literal["small", "medium", "large"]
# Rows from which a data set is no longer small, respectively medium.
_MEDIUM, _LARGE = 1_000, 10_000
_EPOCHS: Mapping[Preset, Mapping[Size, float]] = {
    "quick": {"small": 1.0, "medium": 1.0, "large": 0.25},
    "balanced": {"small": 3.0, "medium": 2.0, "large": 1.0},
    "thorough": {"small": 5.0, "medium": 3.0, "large": 2.0},
}
# What any of them sets.
FIELDS = frozenset(
    {"epochs", "max_steps", "evaluation_fraction", "learning_rate", "evaluate_every", "patience", "keep_best"}
)
LORA_FIELDS = frozenset({"rank", "alpha"})
_EVALUATED_ROWS = 500
_EVALUATIONS = 10
_UNKNOWN_STEPS = 200


def size_of(rows: int | None) -> Size:
    """The class of a data set; one that is not known yet counts as small."""
    return "small" if rows is None or rows < _MEDIUM else "medium" if rows < _LARGE else "large"


def fields(preset: Preset, rows: int | None, tokens: int | None, tokens_per_step: int) -> dict[str, Any]:
    """What the preset sets of a `JobCreate` (``lora`` holding its part), for a data set of `rows` and `tokens` (None:
    not known) and optimizer steps of about `tokens_per_step`."""
    epochs = _EPOCHS[preset][size_of(rows)]
    chosen: dict[str, Any] = {"epochs": epochs}
    fraction: float = JobCreate.model_fields["evaluation_fraction"].default
    if rows is not None and rows * fraction > _EVALUATED_ROWS:
        chosen["evaluation_fraction"] = fraction = round(_EVALUATED_ROWS / rows, 6)
    if preset == "thorough":
        steps = math.ceil(tokens * (1 - fraction) * epochs / tokens_per_step) if tokens else _UNKNOWN_STEPS
        chosen |= {
            "lora": {"rank": 16, "alpha": 32.0},
            "learning_rate": 5e-4,
            "evaluate_every": max(1, round(steps / _EVALUATIONS)),
            "patience": 3,
            "keep_best": True,
        }
    return chosen


def applied(
    job: JobCreate, rows: int | None, tokens: int | None, *, micro_batch_tokens: int, max_rank: int | None
) -> JobCreate:
    """The job with what its preset sets filled in where nothing was given, within the rank that can be served."""
    if job.preset is None:
        return job
    per_step = (job.micro_batch_tokens or micro_batch_tokens) * job.accumulation
    chosen = fields(job.preset, rows, tokens, per_step)
    given = job.model_fields_set
    lora = dict(chosen.pop("lora", {}))
    if max_rank is not None and lora.get("rank", 0) > max_rank:
        lora["alpha"] *= max_rank / lora["rank"]
        lora["rank"] = max_rank
    if job.initial_adapter is None:
        mine = {name: value for name, value in lora.items() if name not in job.lora.model_fields_set}
        job = job.model_copy(update={"lora": job.lora.model_copy(update=mine)})
    if "max_steps" in given and job.max_steps is not None:
        chosen.pop("epochs")
    if job.evaluation_fraction == 0 and "evaluation_fraction" in given:
        for name in ("evaluate_every", "patience", "keep_best"):
            chosen.pop(name, None)
    return job.model_copy(update={name: value for name, value in chosen.items() if name not in given})
