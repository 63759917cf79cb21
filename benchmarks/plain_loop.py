"""The loop that everyone writes: Hugging Face + peft + `torch.optim.AdamW`, one `backward` per micro-batch.

The yardstick of Harli's trainer, for its losses, its weights and its speed. It shares the packed batches with the
trainer and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import PreTrainedModel, get_cosine_schedule_with_warmup

from core.intake.packing import MicroBatch


@dataclass(frozen=True)
class PlainRun:
    """losses: nats per trained token, one an optimizer step; initial and final: LoRA weights by name, fp32 masters;
    seconds: of each step."""

    losses: list[float]
    initial: dict[str, torch.Tensor]
    final: dict[str, torch.Tensor]
    seconds: list[float]


def train(
    model: PreTrainedModel,
    steps: Sequence[Sequence[MicroBatch]],
    *,
    rank: int,
    alpha: float,
    learning_rate: float,
    max_grad_norm: float,
    seed: int,
) -> PlainRun:
    """Train LoRA on all linear layers of `model` (which is wrapped in place) with fp32 masters, cosine, no warm-up.

    Each element of `steps` holds the micro-batches of one optimizer step.
    """
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    torch.manual_seed(seed)
    wrapped = get_peft_model(
        model,
        LoraConfig(r=rank, lora_alpha=alpha, target_modules=modules, task_type="CAUSAL_LM"),
        autocast_adapter_dtype=False,
    )
    wrapped.train()
    working = {name: p for name, p in wrapped.named_parameters() if p.requires_grad}
    masters = {name: torch.nn.Parameter(p.detach().float().clone()) for name, p in working.items()}
    initial = {name: p.detach().clone() for name, p in masters.items()}
    optimizer = torch.optim.AdamW(masters.values(), lr=learning_rate, weight_decay=0.0)
    schedule = get_cosine_schedule_with_warmup(optimizer, 0, len(steps))
    losses, seconds = [], []
    for batches in steps:
        began = time.perf_counter()
        denominator = sum(batch.trained for batch in batches)
        total = 0.0
        for batch in batches:
            loss = _loss(wrapped, batch) / denominator
            loss.backward()
            total += loss.item()
        for name, p in working.items():
            masters[name].grad = p.grad.float()
            p.grad = None
        torch.nn.utils.clip_grad_norm_(masters.values(), max_grad_norm)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for name, p in working.items():
                p.copy_(masters[name])
        losses.append(total)
        seconds.append(time.perf_counter() - began)
    return PlainRun(losses, initial, {name: p.detach().clone() for name, p in masters.items()}, seconds)


def _loss(model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
    """Summed cross entropy of the answers; the head sees only the positions that count, as in the trainer."""
    device = next(model.parameters()).device
    segments, labels = torch.from_numpy(batch.segments).to(device), torch.from_numpy(batch.labels).to(device)
    causal = torch.ones(len(segments), len(segments), dtype=torch.bool, device=device).tril()
    hidden = model.base_model.model.model(
        input_ids=torch.from_numpy(batch.ids)[None].to(device),
        position_ids=torch.from_numpy(batch.positions)[None].to(device),
        attention_mask=(causal & (segments[:, None] == segments[None, :]))[None, None],
        use_cache=False,
    ).last_hidden_state[0]
    counted = labels >= 0
    logits = model.base_model.model.lm_head(hidden[counted])
    return F.cross_entropy(logits.float(), labels[counted], reduction="sum")
