"""Finetuning alone on one GPU: our captured trainer against the loops that people run, on one shape and the same data.

    python -m benchmarks.exclusive [--trainers harli,liger] [--seconds 4]

LoRA of rank 16 on all linear layers of a Llama-3-8B-shaped model with random bf16 weights, AdamW, every token trained.
A batch of rows x sequence length tokens is one micro-batch and one optimizer step. The others are Hugging Face + peft
over the very same weights with sdpa: with peft's default fp32 adapters, with bf16 adapters, with compiled layers, with
Liger's kernels.

mfu counts what the update needs and nothing that is done twice: per token 4 FLOP for each element of the layers' and
the head's matrices (forward, and the gradient of the input; frozen weights have none of their own) and 6 x sequence
length x query width a layer for causal attention, over the data sheet's dense bf16 rate of an H200, 989 TFLOP/s.
peak_gib is what torch allocated at most, the model's weights (15.0 GiB) included. Long runs of matrix products are
bound by the power that the card may draw; the row of the products alone shows by how much.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, PreTrainedModel

from benchmarks import record
from core.finetune import lora, views
from core.finetune.captured import CapturedTrainer, Slot
from core.finetune.fused import FusedWeights
from core.intake.chat import Encoded
from core.intake.packing import MicroBatch, build
from core.link.messages import LoraSpec

PEAK_FLOPS = 989e12
SIZES = ((4, 512), (8, 1024))
RANK, ALPHA = 16, 32.0
LLAMA_3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "architectures": ["LlamaForCausalLM"],
}


class RandomServed(torch.nn.Module):
    """Random bf16 weights in SGLang's layout, made on the GPU."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.intermediate_size
        head_dim = hidden // config.num_attention_heads
        kv = config.num_key_value_heads * head_dim
        sizes = {"model.embed_tokens": (config.vocab_size, hidden), "lm_head": (config.vocab_size, hidden)}
        norms = ["model.norm"]
        for index in range(config.num_hidden_layers):
            layer = f"model.layers.{index}."
            sizes[layer + "self_attn.qkv_proj"] = (hidden + 2 * kv, hidden)
            sizes[layer + "self_attn.o_proj"] = (hidden, hidden)
            sizes[layer + "mlp.gate_up_proj"] = (2 * width, hidden)
            sizes[layer + "mlp.down_proj"] = (hidden, width)
            norms += [layer + "input_layernorm", layer + "post_attention_layernorm"]
        bf16: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        tensors = {name: torch.empty(size, **bf16).normal_(0, 0.02) for name, size in sizes.items()}
        tensors |= {name: torch.ones(hidden, **bf16) for name in norms}
        for name, tensor in tensors.items():
            owner: torch.nn.Module = self
            for part in name.split("."):
                if not hasattr(owner, part):
                    owner.add_module(part, torch.nn.Module())
                owner = getattr(owner, part)
            owner.register_parameter("weight", torch.nn.Parameter(tensor, requires_grad=False))


def served_and_model(**changes: Any) -> tuple[RandomServed, PreTrainedModel]:
    """The fused weights and a Hugging Face model over them."""
    config = LlamaConfig(**(LLAMA_3_8B | changes))
    served = RandomServed(config)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return served, views.shared_model(served, Path(folder))


def flops_per_token(sequence: int) -> float:
    """See the module's docstring."""
    c = LLAMA_3_8B
    hidden, layers = c["hidden_size"], c["num_hidden_layers"]
    kv = c["num_key_value_heads"] * hidden // c["num_attention_heads"]
    layer = hidden * (2 * hidden + 2 * kv + 3 * c["intermediate_size"])
    return 4 * (layers * layer + c["vocab_size"] * hidden) + 6 * sequence * hidden * layers


def micro_batch(ids: np.ndarray) -> MicroBatch:
    """Rows [B, S], every token trained, as one packed micro-batch."""
    rows = [Encoded(row.astype(np.int32), np.ones(len(row), dtype=bool)) for row in ids]
    return build(rows, ids.size)


def measured(step: Callable[[], None], seconds: float) -> float:
    """Seconds a step, after three that warm up; as many as fit."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    count = 0
    while time.perf_counter() - began < seconds:
        step()
        count += 1
        if count % 4 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count


def harli(served: RandomServed, model: PreTrainedModel, seconds: float) -> Iterator[tuple[int, int, float]]:
    """(rows, sequence, seconds a step) of our trainer at each size."""
    weights = FusedWeights.of(served, model)
    wrapped = lora.wrap(model, LoraSpec(rank=RANK, alpha=ALPHA), seed=0, base_name="random")
    parameters = {name: p.detach().clone() for name, p in lora.trainable(wrapped).items()}
    wrapped.unload()
    for rows, sequence in SIZES:
        torch.cuda.reset_peak_memory_stats()
        trainer = CapturedTrainer(weights, Slot(RANK, rows * sequence), [torch.cuda.Stream()])
        print("capture", round(trainer.capture_s, 2), "s", round(trainer.memory_bytes / 2**30, 2), "GiB", flush=True)
        trainer.load_job(parameters, scaling=ALPHA / RANK, weight_decay=0.01, max_grad_norm=1.0)
        torch.cuda.synchronize()
        batch = micro_batch(np.random.default_rng(0).integers(0, 128000, (rows, sequence)))

        def step(trainer: CapturedTrainer = trainer, batch: MicroBatch = batch) -> None:
            for index in range(len(trainer.load_step([batch], 1e-4))):
                trainer.launch(0, index)

        yield rows, sequence, measured(step, seconds)
        print("losses", [round(r.loss, 3) for r in trainer.results()][:3], flush=True)
        del trainer, step
        gc.collect()
        torch.cuda.empty_cache()


def multiply_all(weights: FusedWeights, data: torch.Tensor, tokens: int) -> None:
    """Every large matrix product of one step, forward and backward; `data` is long enough to be any left side."""

    def product(rows: int, matrix: torch.Tensor) -> None:
        torch.mm(data[: rows * matrix.shape[0]].view(rows, -1), matrix)

    for number, layer in enumerate(weights.layers):
        for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down):
            product(tokens, matrix.t())
            if number > 0 or matrix is not layer.qkv:
                product(tokens, matrix)
    for _ in range(4):
        product(tokens // 4, weights.head.t())
        product(tokens // 4, weights.head)


def products(served: RandomServed, model: PreTrainedModel, seconds: float) -> Iterator[tuple[int, int, float]]:
    """The step's large matrix products in a graph and nothing else: what the chip allows at its power limit."""
    weights = FusedWeights.of(served, model)
    for rows, sequence in SIZES:
        torch.cuda.reset_peak_memory_stats()
        tokens, stream, graph = rows * sequence, torch.cuda.Stream(), torch.cuda.CUDAGraph()
        longest = max(2 * weights.shape.intermediate, weights.shape.vocabulary // 4)
        data = torch.randn(tokens * longest, device="cuda", dtype=torch.bfloat16)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            multiply_all(weights, data, tokens)
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                multiply_all(weights, data, tokens)
            yield rows, sequence, measured(graph.replay, seconds)
        del graph, data
        torch.cuda.empty_cache()


def peft_loop(
    model: PreTrainedModel, seconds: float, *, fp32_adapters: bool, compiled: bool
) -> Iterator[tuple[int, int, float]]:
    """The same of a Hugging Face + peft loop."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    wrapped = get_peft_model(model, config, autocast_adapter_dtype=fp32_adapters)
    wrapped.train()
    if fp32_adapters:
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    if compiled:
        for layer in model.model.layers:
            layer.forward = torch.compile(layer.forward, dynamic=False)
    parameters = [p for p in wrapped.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    for rows, sequence in SIZES:
        torch.cuda.reset_peak_memory_stats()
        ids = torch.from_numpy(np.random.default_rng(0).integers(0, 128000, (rows, sequence))).cuda()

        def step(ids: torch.Tensor = ids) -> None:
            wrapped(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        yield rows, sequence, measured(step, seconds)
    wrapped.unload()


def liger() -> None:
    """Put Liger's kernels into transformers' Llama."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(
        rope=True, swiglu=True, rms_norm=True, cross_entropy=False, fused_linear_cross_entropy=True
    )


TRAINERS: dict[str, str] = {
    "products": "none: the step's large matrix products alone",
    "harli": "Harli, captured tasklets",
    "peft-fp32": "Hugging Face + peft, fp32 adapters (peft's default)",
    "peft-bf16": "Hugging Face + peft, bf16 adapters",
    "compiled": "Hugging Face + peft, bf16 adapters, layers compiled",
    "liger": "Hugging Face + peft + Liger, bf16 adapters",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--trainers", default=",".join(TRAINERS))
    parser.add_argument("--seconds", type=float, default=4.0)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in arguments.trainers.split(","):
        if name == "liger":  # last: it changes transformers' classes for good
            liger()
        served, model = served_and_model()
        if name in ("harli", "products"):
            runs = (harli if name == "harli" else products)(served, model, arguments.seconds)
        else:
            runs = peft_loop(model, arguments.seconds, fp32_adapters=name == "peft-fp32", compiled=name == "compiled")
        for batch, sequence, seconds in runs:
            rate = batch * sequence / seconds
            rows.append(
                {
                    "trainer": TRAINERS[name],
                    "micro_batch_tokens": batch * sequence,
                    "seq_len": sequence,
                    "tokens_s": round(rate),
                    "ms": round(seconds * 1e3, 1),
                    "mfu": round(rate * flops_per_token(sequence) / PEAK_FLOPS, 3),
                    "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
                }
            )
            print(rows[-1], flush=True)
            body = record.provenance("torch", "transformers", "peft", "triton", "liger-kernel") | {"rows": rows}
            body["machine"] = f"{torch.cuda.get_device_name()}; {body['machine']}"
            record.write("exclusive", body)
        del served, model
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
