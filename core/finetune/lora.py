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


def wrap(
    model: PreTrainedModel, lora: LoraSpec, *, seed: int, base_name: str, initial: Path | None = None
) -> PeftModel:
    """Add LoRA parameters in the model's dtype: fresh ones, whose values `seed` fixes, or those of the adapter folder
    `initial`.

    The generators of torch are left as they were found: SGLang samples from them. Raises `Invalid`, with the model as
    it was, when the initial adapter has another rank or other modules.
    """
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    if initial is not None:
        _check_initial(initial, lora)
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
        if initial is not None:
            with torch.no_grad():
                set_peft_model_state_dict(wrapped, load_file(initial / "adapter_model.safetensors"))
    wrapped.peft_config["default"].base_model_name_or_path = base_name
    return wrapped  # type: ignore[return-value]


def _check_initial(folder: Path, lora: LoraSpec) -> None:
    theirs = json.loads((folder / "adapter_config.json").read_text())
    for field, has, wants in (
        ("rank", theirs["r"], lora.rank),
        ("target_modules", sorted(theirs["target_modules"]), sorted(lora.target_modules)),
    ):
        if has != wants:
            raise Invalid(
                "initial_adapter",
                f"the adapter to start from has {field} {has!r}, the job asks for {wants!r}; use the adapter's",
                f"lora.{field}",
            )


def trainable(model: PeftModel) -> dict[str, torch.nn.Parameter]:
    """The LoRA parameters by name, in a stable order."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def save(model: PeftModel, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write `tensors` (a copy of `trainable`'s values, on the CPU) as a peft adapter folder; may run in any thread."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(str(folder), state_dict=tensors, save_embedding_layers=False)  # type: ignore[arg-type]
    (folder / "README.md").unlink(missing_ok=True)  # peft's model card, empty of anything that is known here
