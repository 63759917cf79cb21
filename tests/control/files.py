"""Small files that people would send: a data set, an adapter, a checkpoint."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from core.api import schemas
from core.control import datasets
from core.control.context import Control


def jsonl(path: Path, rows: int = 8, words: int = 4) -> Path:
    """A data set of chats."""
    lines = [
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": f"Where does river {number} go?"},
                    {"role": "assistant", "content": " ".join(["down"] * words) + f" to sea {number}."},
                ]
            }
        )
        for number in range(rows)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def stored_dataset(control: Control, tmp_path: Path, name: str = "rivers", **shape: int) -> schemas.Dataset:
    """A data set in the store, as an upload puts it there."""
    path = jsonl(tmp_path / f"{name}.jsonl", **shape)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return datasets.store(control, path, path.name, sha256, name, None, False)[0]


def adapter(folder: Path, rank: int = 8, modules: tuple[str, ...] = ("q_proj", "v_proj"), **config: Any) -> Path:
    """A peft folder for a model of two layers and hidden size 32."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for layer in range(2):
        for module in modules:
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.full((rank, 32), 0.5)
            tensors[f"{name}.lora_B.weight"] = torch.zeros(32, rank)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "small",
        "r": rank,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "target_modules": list(modules),
        "bias": "none",
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def checkpoint(job_folder: Path, step: int) -> Path:
    """What the engine writes at a step."""
    folder = job_folder / "checkpoints" / f"step-{step:08d}"
    adapter(folder / "adapter")
    (folder / "state.json").write_text(json.dumps({"step": step}))
    return folder
