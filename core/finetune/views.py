"""A Hugging Face model whose parameters are views of SGLang's weights, so that finetuning costs no second copy.

SGLang keeps q, k and v as the rows of one `qkv_proj`, gate and up as the rows of one `gate_up_proj`, and pads the
vocabulary; a row slice of a contiguous matrix is a view, so each Hugging Face parameter is one.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from core.errors import Invalid
from core.torchvision_ops import declare

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class UnsupportedWeights(Invalid):
    """The served weights cannot be shared with a Hugging Face model."""


def shared_model(served: torch.nn.Module, model_path: Path) -> PreTrainedModel:
    """The frozen Hugging Face model of `model_path` over the tensors of `served` (SGLang's model, tensor parallel 1).

    Every parameter of the result aliases memory of `served`; only rotary tables are new. Raises `UnsupportedWeights`
    for architectures or layouts (quantised, tensor parallel) whose rows are not plain matrices.
    """
    declare()
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_path, local_files_only=True)
    architecture = (config.architectures or ["unknown"])[0]
    if architecture not in ARCHITECTURES:
        raise UnsupportedWeights(
            "unsupported_architecture",
            f"{model_path}: finetuning knows {', '.join(ARCHITECTURES)}, not {architecture}; serve one of those",
            "model",
        )
    tensors = {
        name.replace(".base_layer.", "."): parameter
        for name, parameter in served.named_parameters(remove_duplicate=False)
    }
    config._attn_implementation = "sdpa"
    with torch.inference_mode(False), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=tensors["model.embed_tokens.weight"].dtype
        )
    for name, expected in list(model.named_parameters(remove_duplicate=False)):
        _set_parameter(model, name, _view(name, expected.shape, tensors, config))
    device = tensors["model.embed_tokens.weight"].device
    with torch.inference_mode(False):
        # Its buffers were made on the meta device and have no counterpart in SGLang.
        model.model.rotary_emb = type(model.model.rotary_emb)(config=config, device=device)
    model.requires_grad_(False)
    model.train(False)
    _assert_shared(model, tensors)
    return model


def _view(
    name: str, shape: torch.Size, tensors: dict[str, torch.nn.Parameter], config: PretrainedConfig
) -> torch.Tensor:
    """The rows of a served tensor that are the Hugging Face parameter `name`."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    q, kv = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    fused = {
        "q_proj": ("qkv_proj", 0, q),
        "k_proj": ("qkv_proj", q, kv),
        "v_proj": ("qkv_proj", q + kv, kv),
        "gate_proj": ("gate_up_proj", 0, config.intermediate_size),
        "up_proj": ("gate_up_proj", config.intermediate_size, config.intermediate_size),
    }
    module = name.rsplit(".", 2)[-2]
    source, start, rows = name, 0, shape[0]
    if module in fused:
        fused_name, start, rows = fused[module]
        source = name.replace(module, fused_name)
    if name == "lm_head.weight" and (config.tie_word_embeddings or name not in tensors):
        source = "model.embed_tokens.weight"
    tensor = tensors.get(source)
    if tensor is None or not tensor.is_floating_point() or tensor.dim() != len(shape):
        raise UnsupportedWeights(
            "unsupported_layout",
            f"served weight {source!r} is {'missing' if tensor is None else f'{tensor.dtype} {tuple(tensor.shape)}'}, "
            f"{name!r} needs plain rows of shape {tuple(shape)}; serve the model unquantised on one GPU",
            "model",
        )
    view = tensor.data[start : start + rows]
    if view.shape != shape or view.is_inference():
        raise UnsupportedWeights(
            "unsupported_layout",
            f"served weight {source!r} gives {tuple(view.shape)} for {name!r}, expected {tuple(shape)}; "
            "serve the model unquantised with tensor parallel size 1",
            "model",
        )
    return view


def _set_parameter(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(tensor, requires_grad=False))


def _assert_shared(model: torch.nn.Module, tensors: dict[str, torch.nn.Parameter]) -> None:
    """No parameter of `model` may own memory: each lies inside a tensor of the served model."""
    spans = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors.values()}
    for name, parameter in model.named_parameters():
        base = parameter.untyped_storage().data_ptr()
        if base not in spans or not base <= parameter.data_ptr() < base + spans[base]:
            raise UnsupportedWeights("not_shared", f"parameter {name!r} does not alias the served weights", "model")
