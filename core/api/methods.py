"""Which ways of finetuning there are: LoRA and rsLoRA. What else peft offers is known by name, to be refused with the
reason instead of as a misspelt field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticCustomError

CODE = "unsupported_method"
_QUANTISED = "the base model is shared with serving, which keeps it in full precision; leave it out"
# Field of peft (or of a neighbour's configuration) → why it is refused when it is set.
_REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA scales the base weights per column, which the engine does not do; train with LoRA or rsLoRA",
    "modules_to_save": "whole modules beside the LoRA cannot be served; leave it out",
    "trainable_token_indices": "trained embeddings cannot be served; leave it out",
    "lora_bias": "LoRA biases cannot be served; leave it out",
    "bias": 'trained biases cannot be served; leave it out, or give "none"',
    "rank_pattern": "the engine serves one rank for all modules; give `rank` alone",
    "alpha_pattern": "the engine serves one alpha for all modules; give `alpha` alone",
    "layers_to_transform": "the engine serves adapters on every layer; leave it out",
    "exclude_modules": "name the modules that are to be trained in `target_modules` instead",
    "use_qalora": _QUANTISED,
    "quantization": _QUANTISED,
    "load_in_4bit": _QUANTISED,
    "load_in_8bit": _QUANTISED,
    "peft_type": "only LoRA adapters can be trained and served; leave it out",
    "init_lora_weights": "adapters start as peft's default does; leave it out",
}
_HARMLESS: Mapping[str, tuple[Any, ...]] = {"bias": ("none",), "peft_type": ("LORA",), "init_lora_weights": (True,)}
_SPELLINGS = {"r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout"}


def plain_lora(given: Any) -> Any:
    """A `lora` body without what says nothing (``use_dora: false``), and with peft's own names of its fields read.

    Raises PydanticCustomError of the kind `CODE`, whose message names field, value and reason.
    """
    if not isinstance(given, Mapping):
        return given
    body = dict(given)
    for field, reason in _REFUSED.items():
        if field not in body:
            continue
        value = body.pop(field)
        if value and value not in _HARMLESS.get(field, ()):
            raise PydanticCustomError(CODE, "{field} is {value}: {reason}", {
                "field": field, "value": _shown(value), "reason": reason,
            })  # fmt: skip
    for theirs, ours in _SPELLINGS.items():
        if theirs in body and ours not in body:
            body[ours] = body.pop(theirs)
    if isinstance(modules := body.get("target_modules"), str):
        raise PydanticCustomError(CODE, "{field} is {value}: {reason}", {
            "field": "target_modules", "value": _shown(modules),
            "reason": "list the modules by name, or leave it out for all that the engine can serve",
        })  # fmt: skip
    return body


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)[:80]
