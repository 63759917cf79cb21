"""LoRA on the shared model, by `peft`: wrapping, starting from an adapter, saving."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file

from core.errors import Invalid
from core.link.messages import LoraSpec

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def wrap(model: PreTrainedModel, lora: LoraSpec, *, seed: int, base_name: str) -> PeftModel:
    """Add fresh LoRA parameters in the model's dtype. `seed` fixes their initial values.

    The generators of torch are left as they were found: SGLang samples from them.
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=list(lora.target_modules),
        use_rslora=lora.use_rslora,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(), torch.inference_mode(False):
        torch.manual_seed(seed)
        wrapped = get_peft_model(model, config, autocast_adapter_dtype=False)
    wrapped.peft_config["default"].base_model_name_or_path = base_name
    return wrapped  # type: ignore[return-value]


def trainable(model: PeftModel) -> dict[str, torch.nn.Parameter]:
    """The LoRA parameters by name, in a stable order."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def load_initial(model: PeftModel, folder: Path) -> None:
    """Start from the adapter in `folder`; its rank and modules must be those of the job."""
    from peft import set_peft_model_state_dict

    config = json.loads((folder / "adapter_config.json").read_text())
    mine = model.peft_config["default"]
    for field, own in (("r", mine.r), ("target_modules", set(mine.target_modules or ()))):
        theirs = set(config[field]) if field == "target_modules" else config[field]
        if theirs != own:
            raise Invalid(
                "initial_adapter",
                f"the adapter to start from has {field} {theirs!r}, the job asks for {own!r}; use the adapter's",
                "initial_adapter",
            )
    with torch.inference_mode(False), torch.no_grad():
        set_peft_model_state_dict(model, load_file(folder / "adapter_model.safetensors"))


def save(model: PeftModel, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write `tensors` (a copy of `trainable`'s values, on the CPU) as a peft adapter folder; may run in any thread."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(str(folder), state_dict=tensors, save_embedding_layers=False)  # type: ignore[arg-type]
    (folder / "README.md").unlink(missing_ok=True)  # peft's model card, empty of anything that is known here
