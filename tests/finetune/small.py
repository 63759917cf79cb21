"""Small random models and rows, and an SGLang-shaped owner of a model's weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from core.intake.chat import Encoded
from core.link.messages import JobSpec, LoraSpec

VOCABULARY = 96
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def model(
    family: str = "llama",
    *,
    tied: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    vocabulary: int = VOCABULARY,
    hidden: int = 32,
    layers: int = 2,
) -> PreTrainedModel:
    """A random small model whose loss can fall."""
    config = AutoConfig.for_model(
        family,
        hidden_size=hidden,
        intermediate_size=hidden * 3 // 2,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        vocab_size=vocabulary,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        pad_token_id=0,
        architectures=[_ARCHITECTURES[family]],
    )
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" not in name:
                torch.nn.init.normal_(parameter, std=0.2)
    return made.requires_grad_(False).eval()


class Served(torch.nn.Module):
    """Owns a model's weights the way SGLang does: q, k, v fused, gate and up fused, the vocabulary padded."""

    def __init__(self, source: PreTrainedModel, padding: int = 32) -> None:
        super().__init__()
        tensors: dict[str, torch.Tensor] = {}
        state = source.state_dict()
        for name, tensor in state.items():
            if any(f".{part}." in name for part in ("k_proj", "v_proj", "up_proj")):
                continue
            if ".q_proj." in name:
                parts = [state[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
                tensors[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
            elif ".gate_proj." in name:
                parts = [tensor, state[name.replace("gate_proj", "up_proj")]]
                tensors[name.replace("gate_proj", "gate_up_proj")] = torch.cat(parts)
            elif name in ("model.embed_tokens.weight", "lm_head.weight"):
                if not (name == "lm_head.weight" and source.config.tie_word_embeddings):
                    tensors[name] = torch.cat([tensor, tensor.new_zeros(padding, tensor.shape[1])])
            else:
                tensors[name] = tensor.clone()
        for name, tensor in tensors.items():
            owner: torch.nn.Module = self
            *path, leaf = name.split(".")
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, torch.nn.Module())
                owner = getattr(owner, part)
            owner.register_parameter(leaf, torch.nn.Parameter(tensor, requires_grad=False))


def folder(of: PreTrainedModel, path: Path) -> Path:
    """A model folder with just the config, which is all that the views read."""
    of.config.save_pretrained(path)
    return path


def rows(count: int = 24, *, seed: int = 0) -> list[Encoded]:
    """Rows with a pattern to learn: an answer counts upward from its prompt's last token."""
    random = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        prompt = random.integers(1, VOCABULARY, size=random.integers(2, 6))
        answer = (prompt[-1] + 1 + np.arange(random.integers(3, 7))) % VOCABULARY
        ids = np.concatenate([prompt, answer]).astype(np.int32)
        made.append(Encoded(ids, np.arange(len(ids)) >= len(prompt)))
    return made


def spec(output_dir: Path, **changes: object) -> JobSpec:
    """A short job over `rows`."""
    fields: dict[str, object] = {
        "job_id": "job",
        "dataset_path": "unused.parquet",
        "adapter_name": "adapter",
        "output_dir": str(output_dir),
        "lora": LoraSpec(rank=4, alpha=8.0),
        "learning_rate": 1e-2,
        "warmup_ratio": 0.0,
        "epochs": None,
        "max_steps": 8,
        "micro_batch_tokens": 32,
        "sequence_length": 32,
        "evaluation_fraction": 0.0,
    }
    return JobSpec(**(fields | changes))  # type: ignore[arg-type]
