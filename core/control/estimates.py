"""What a job will take, before it is queued: steps and tokens from the data set's rows, seconds from the speed that was
measured, memory from the model's configuration. What is not known is left out, and `notes` say why."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from core.api import schemas
from core.api.job_schemas import JobEstimate, MemoryEstimate, Speed
from core.control import bases
from core.intake import packing
from db.base import now
from db.engines import EngineRecord
from db.jobs import JobRecord

# Rows that are packed to see how well they fill micro-batches; of a larger data set the others are taken to fill them
# alike.
_PACKED_ROWS = 100_000
_FAR_S = 10 * 365 * 86_400.0
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1", "0.0.0.0"})


@dataclass(frozen=True, slots=True)
class Work:
    """What there is to do. `tokens` without padding; `exact`: every epoch was counted row by row as the first one."""

    training_rows: int
    steps: int
    micro_batches: int
    evaluations: int
    tokens: int
    padding_share: float


def work(lengths: Sequence[int], spec: schemas.JobCreate) -> Work:
    """Of a resolved job over rows of these lengths in tokens. Raises Invalid when a row fits no micro-batch, or no row
    is left to train on."""
    assert spec.micro_batch_tokens is not None
    return _work(
        tuple(lengths), spec.micro_batch_tokens, spec.accumulation, spec.epochs, spec.max_steps, spec.seed,
        spec.evaluation_fraction, spec.evaluate_every,
    )  # fmt: skip


@lru_cache(maxsize=16)
def _work(
    lengths: tuple[int, ...],
    size: int,
    accumulation: int,
    epochs: float | None,
    max_steps: int | None,
    seed: int,
    fraction: float,
    every: int,
) -> Work:
    training, held_out = packing.split(len(lengths), fraction, seed)
    seen = training[:_PACKED_ROWS]
    plan = packing.epoch_plan([lengths[row] for row in seen], size, seed=seed, epoch=0)
    tokens = sum(lengths[row] for row in training)
    packed = sum(lengths[row] for row in seen)
    per_epoch = max(1, round(len(plan) * tokens / packed)) if packed else 0
    if max_steps is not None:
        micro_batches = max_steps * accumulation
    else:
        whole, part = divmod(epochs or 1.0, 1.0)
        micro_batches = int(whole) * per_epoch + math.ceil(per_epoch * part)
    steps = math.ceil(micro_batches / accumulation)
    return Work(
        training_rows=len(training),
        steps=steps,
        micro_batches=micro_batches,
        evaluations=_evaluations(steps, every) if held_out else 0,
        tokens=round(tokens * micro_batches / per_epoch) if per_epoch else 0,
        padding_share=1 - packed / (len(plan) * size) if plan else 0.0,
    )


def _evaluations(steps: int, every: int) -> int:
    """Every so many steps, and once at the end."""
    return steps // every + (steps % every > 0) if every else 1


def tokens_left(job: JobRecord) -> float | None:
    """What a job has yet to train on; None when it is not known how much that is."""
    if job.expected_tokens is None:
        return None
    if job.total_steps:
        return job.expected_tokens * max(0.0, 1 - job.step / job.total_steps)
    return max(0.0, float(job.expected_tokens - job.tokens))


def end_after(seconds: float) -> datetime | None:
    """The moment so far from now; None for one that is too far away to mean anything."""
    return now() + timedelta(seconds=seconds) if seconds < _FAR_S else None


def estimate(
    spec: schemas.JobCreate,
    rows: int,
    lengths: Sequence[int] | None,
    *,
    speed: Speed | None,
    before: Sequence[JobRecord],
    engine: EngineRecord | None,
    model: Path | None,
) -> JobEstimate:
    """Of a resolved job. lengths: tokens of each row, None without the model's tokenizer; before: the jobs that are run
    first, in their order; model: the served model's folder."""
    notes: list[str] = []
    todo = work(lengths, spec) if lengths else None
    if todo is None:
        notes.append("steps and tokens are not known yet: no engine has been here, and its tokenizer counts them")
    if speed is None:
        notes.append("time is not known yet: no job has been trained by this engine, so no speed was measured")
    elif spec.base_model is not None:
        notes.append(f"the speed is that of the jobs before, whatever their base; {spec.base_model} has its own")
    seconds = todo.tokens / speed.tokens_s if todo is not None and speed is not None else None
    left = [tokens_left(job) for job in before]
    wait = sum(tokens for tokens in left if tokens is not None) / speed.tokens_s if speed is not None else None
    if None in left:
        wait = None
        notes.append("how long it waits is not known: the length of a job before it is not")
    end = end_after(wait + seconds) if wait is not None and seconds is not None else None
    if end is not None and spec.deadline is not None and end > spec.deadline:
        notes.append(f"at the present speed it ends at {end:%Y-%m-%d %H:%M} UTC, after its deadline")
    if spec.patience and todo is not None:
        notes.append(f"it may end earlier, when {spec.patience} evaluations in a row bring no improvement")
    return JobEstimate(
        spec=spec,
        rows=rows,
        training_rows=todo.training_rows if todo is not None else rows,
        longest_row_tokens=max(lengths) if lengths else None,
        steps=todo.steps if todo is not None else None,
        micro_batches=todo.micro_batches if todo is not None else None,
        evaluations=todo.evaluations if todo is not None else None,
        tokens=todo.tokens if todo is not None else None,
        padding_share=todo.padding_share if todo is not None else None,
        speed=speed,
        seconds_per_step=seconds / todo.steps if seconds is not None and todo is not None and todo.steps else None,
        seconds=seconds,
        wait_s=wait,
        eta=end,
        memory=memory(spec, engine, model),
        notes=notes,
    )


# ---- memory ----------------------------------------------------------------------------------------------------------


def memory(spec: schemas.JobCreate, engine: EngineRecord | None, model: Path | None) -> MemoryEstimate:
    """Whether the engine has room for the job."""
    if engine is None or model is None or not (model / "config.json").is_file():
        return MemoryEstimate(fits=None, reason="not known yet: no engine has been here")
    base = bases.of(engine, spec.base_model)
    if slot := engine.hello.get("finetune_slot"):
        rank, tokens = slot
        host = f"; {base['name']} takes {base['host_bytes'] / 2**30:.1f} GiB of its host memory" if base else ""
        return MemoryEstimate(
            fits=True,
            reason=f"the engine took the memory of a job of rank {rank} and {tokens} tokens when it started{host}",
        )
    needed = needed_bytes(json.loads((model / "config.json").read_bytes()), spec, engine.hello["dtype"])
    frozen = ""
    if base is not None:
        needed += base["window_bytes"] + base["host_bytes"]
        frozen = f", the weights of {base['name']} and a window of {base['window_layers']} of its layers"
    host = urlsplit(engine.hello["http_url"]).hostname
    if engine.hello["device"] != "cpu" or host not in _LOOPBACK:
        return MemoryEstimate(
            fits=None, needed_bytes=needed, reason="what is free on the engine's device is not known here"
        )
    free = psutil.virtual_memory().available
    return MemoryEstimate(
        fits=needed <= free,
        needed_bytes=needed,
        free_bytes=free,
        reason=f"adapter, optimizer, the activations of one micro-batch{frozen}, against the free memory of this "
        "machine",
    )


def needed_bytes(config: Mapping[str, Any], spec: schemas.JobCreate, dtype: str) -> int:
    """Bytes that eager finetuning takes beside the served weights, from above: adapter, its gradients, fp32 masters and
    two moments; every layer's saved activations of one micro-batch; the head's logits of one chunk."""
    assert spec.micro_batch_tokens is not None
    hidden, layers, inner = config["hidden_size"], config["num_hidden_layers"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    query, key = heads * width, config.get("num_key_value_heads", heads) * width
    shapes = {
        "q_proj": (hidden, query), "k_proj": (hidden, key), "v_proj": (hidden, key), "o_proj": (query, hidden),
        "gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden),
    }  # fmt: skip
    rank, tokens = spec.lora.rank, spec.micro_batch_tokens
    value = 4 if dtype == "float32" else 2
    chosen = [shapes[module] for module in spec.lora.target_modules if module in shapes]
    parameters = layers * rank * sum(sum(shape) for shape in chosen)
    # Saved for backward, per token and layer: norms, projections, rotary copies, the MLP's products, LoRA's inner ones.
    saved = 6 * hidden + 3 * query + 4 * key + 4 * inner + rank * len(chosen)
    attention = heads * tokens * tokens * (2 if dtype == "float32" else 1)
    activations = layers * (tokens * saved + attention) * value
    logits = 3 * 4 * tokens * config["vocab_size"] // 8
    return int(parameters * (2 * value + 12) + activations + logits)
