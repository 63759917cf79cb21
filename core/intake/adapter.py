"""LoRA adapters that come in: unpack safely, check, bring to the one form that the engine serves.

That form is a folder with adapter_config.json and adapter_model.safetensors as `peft` writes them: standard module
names, target modules as a list, rank-stabilised scaling folded into alpha (SGLang ignores ``use_rslora``).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from core.errors import Invalid
from core.intake import archive

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
# Far beyond what makes sense; what is larger is no number of that kind.
_MAX_RANK, _MAX_ALPHA = 1 << 16, 1e9
_MAX_HEADER_BYTES = 16 << 20
_MAX_NAME = 255
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Of each kind of float that can be served: its words, and the bits that are all set in NaN and infinity alone.
_DTYPES = {"F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
_CHUNK_BYTES = 8 << 20
_PREFIX = "base_model.model."
# Other people's names of the same modules.
_PARENTS = {"feed_forward": "mlp", "attention": "self_attn"}
_LEAVES = {
    "wq": "q_proj",
    "wk": "k_proj",
    "wv": "v_proj",
    "wo": "o_proj",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
}
# SGLang serves these out of fused weights, and finds no place for one without the others (`normalize_qkv_proj`).
_TOGETHER = {"q_proj": ("v_proj",), "k_proj": ("q_proj", "v_proj"), "v_proj": ("q_proj",), "up_proj": ("gate_proj",)}
_VARIANT = "the engine computes plain LoRA, and this is another sum: train without it"
_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.[^.]+)?\.weight")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """rank and alpha as served (scaling = alpha / rank); target_modules: leaf names, sorted; bytes and sha256 of the
    two files; base_model: what the adapter says it was trained on; use_rslora: it came with rank-stabilised scaling,
    which alpha now holds."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    bytes: int
    sha256: str
    base_model: str | None
    use_rslora: bool


def unpack(source: Path, destination: Path, *, max_bytes: int, title: str | None = None) -> AdapterInfo:
    """Take a folder, a zip or a tar (plain or gzip) in as an adapter folder at `destination`, which must not exist.
    Errors call it `title` (None: the source's name).

    Only the configuration and the weights are kept. Raises Invalid, and leaves nothing behind, for members that would
    leave the folder or are links (the whole archive is refused), contents over `max_bytes`, pickled weights, weights
    that are NaN or infinite, and everything that `normalise` refuses.
    """
    if destination.exists():
        raise Invalid("adapter_exists", f"{destination} is there already. Give a new name or version.", "adapter")
    part = destination.with_name(f".{destination.name}.{secrets.token_hex(4)}.part")
    part.mkdir(parents=True)
    try:
        title = title or source.name
        with archive.opened(source, max_bytes=max_bytes, title=title) as members:
            config, weights = _locate(list(members.sizes), title)
            members.extract({config: part / CONFIG, weights: part / WEIGHTS})
        info = normalise(part)
        _check_finite(part / WEIGHTS)
        os.replace(part, destination)
        return info
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _locate(names: Sequence[str], source: str) -> tuple[str, str]:
    """The members that are the configuration and the weights: the outermost, for checkpoints may lie deeper."""
    configs = sorted((name for name in names if _basename(name) == CONFIG), key=lambda name: name.count("/"))
    if not configs:
        raise Invalid(
            "adapter_incomplete",
            f"{source} has no {CONFIG}. Upload the folder that peft's save_pretrained writes, as a zip or tar.",
            "file",
        )
    if len(configs) > 1 and configs[0].count("/") == configs[1].count("/"):
        raise Invalid(
            "adapter_ambiguous",
            f"{source} holds several adapters: {configs[0]} and {configs[1]}. Upload one at a time.",
            "file",
        )
    folder = configs[0].removesuffix(CONFIG)
    beside = [name for name in names if name.startswith(folder) and "/" not in name.removeprefix(folder)]
    beside = [name for name in beside if not _basename(name).startswith("._")]  # macOS writes one beside each file
    weights = [name for name in beside if name.endswith(".safetensors")]
    weights = [name for name in weights if _basename(name) == WEIGHTS] or weights
    if len(weights) != 1:
        pickled = [_basename(name) for name in beside if name.lower().endswith(_PICKLES)]
        if pickled and not weights:
            raise Invalid(
                "adapter_pickle",
                f"{source} has its weights in {pickled[0]} only, a pickle, which could run code and is never loaded. "
                "Save it again with save_pretrained(..., safe_serialization=True).",
                "file",
            )
        raise Invalid(
            "adapter_incomplete",
            f"{source} has {len(weights)} safetensors files beside {configs[0]}; one is needed, {WEIGHTS}.",
            "file",
        )
    return configs[0], weights[0]


def _basename(name: str) -> str:
    return name.rsplit("/", 1)[-1]


# ---- the one form ----------------------------------------------------------------------------------------------------


def normalise(folder: Path) -> AdapterInfo:
    """Bring an adapter folder to the served form, in place; doing it again changes nothing.

    Raises Invalid for what is no plain LoRA (DoRA, `modules_to_save`, biases, ranks per module, …), with the reason,
    and where configuration and tensors do not agree.
    """
    config = _read_config(folder)
    rank, alpha = _plain_lora(config)
    use_rslora = bool(config.get("use_rslora"))
    if use_rslora:
        alpha *= math.sqrt(rank)
    shapes = _shapes(folder)
    names = {key: _standard_key(key) for key in shapes}
    modules = _check_tensors({names[key]: shape for key, shape in shapes.items()}, rank, config.get("target_modules"))
    if any(key != name for key, name in names.items()):
        _rename_tensors(folder / WEIGHTS, names)
    config |= {
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "use_rslora": False,
        "target_modules": modules,
        "rank_pattern": {},
        "alpha_pattern": {},
        "inference_mode": True,
    }
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    if (folder / CONFIG).read_text(encoding="utf-8") != text:
        _replace(folder / CONFIG, lambda part: part.write_text(text, encoding="utf-8"))
    return AdapterInfo(
        rank=rank,
        alpha=alpha,
        target_modules=tuple(modules),
        bytes=sum((folder / name).stat().st_size for name in (CONFIG, WEIGHTS)),
        sha256=_digest(folder),
        base_model=_as_name(config.get("base_model_name_or_path")),
        use_rslora=use_rslora,
    )


def _as_name(value: Any) -> str | None:
    """What a configuration calls something, None where that is no name."""
    if not isinstance(value, str) or not value:
        return None
    return value.encode("utf-8", "replace").decode().replace("\0", "")[:_MAX_NAME] or None


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    part = path.with_name(f".{path.name}.part")
    write(part)
    os.replace(part, path)


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise Invalid(
            "adapter_damaged", f"{CONFIG} cannot be read ({error}). Save the adapter again.", CONFIG
        ) from error
    if not isinstance(config, dict):
        raise Invalid("adapter_damaged", f"{CONFIG} is no JSON object. Save the adapter again.", CONFIG)
    return config


def _plain_lora(config: Mapping[str, Any]) -> tuple[int, float]:
    """Rank and alpha of a plain LoRA; anything else raises Invalid with the reason."""
    rank: Any = config.get("r")
    alpha: Any = config.get("lora_alpha")
    if config.get("peft_type") != "LORA":
        raise _refused("adapter_kind", "peft_type", config.get("peft_type"), "only LoRA adapters can be served")
    if type(rank) is not int or not 1 <= rank <= _MAX_RANK:
        raise _refused("adapter_rank", "r", rank, f"the rank must be a whole number from 1 to {_MAX_RANK:,}")
    if type(alpha) not in (int, float) or not 0 < alpha <= _MAX_ALPHA:
        raise _refused("adapter_alpha", "lora_alpha", alpha, f"it must be a number above 0, at most {_MAX_ALPHA:g}")
    for field, is_set, reason in (
        ("use_dora", bool, "DoRA scales the base weights per column, which the engine does not do: train with LoRA"),
        ("modules_to_save", bool, "whole modules beside the LoRA cannot be served: train without modules_to_save"),
        ("trainable_token_indices", bool, "trained embeddings cannot be served: train without them"),
        ("lora_bias", bool, "LoRA biases cannot be served: train without them"),
        ("bias", _is_bias, 'trained biases cannot be served: train with bias="none"'),
        ("alora_invocation_tokens", bool, "it counts behind these tokens only, and a LoRA is served for all"),
        ("layer_replication", bool, "it belongs to a model whose layers are there several times"),
        ("use_qalora", bool, _VARIANT),
        ("kasa_config", bool, _VARIANT),
        ("fan_in_fan_out", bool, "weights stored transposed are not served"),
        ("rank_pattern", partial(_differs, rank), "one rank is served for all modules"),
        ("alpha_pattern", partial(_differs, alpha), "one alpha is served for all modules"),
        (
            "init_lora_weights",
            _changes_base,
            "it belongs to a changed base model; convert it with peft's path_initial_model_for_weight_conversion",
        ),
    ):
        if is_set(config.get(field)):
            raise _refused(f"adapter_{field}", field, config[field], reason)
    return rank, float(alpha)


def _is_bias(value: Any) -> bool:
    return value not in (None, "none")


def _differs(common: float, pattern: Any) -> bool:
    return isinstance(pattern, dict) and any(of != common for of in pattern.values())


def _changes_base(init: Any) -> bool:
    """Initialisations that move a part of the base weights into the adapter."""
    return isinstance(init, str) and init.lower().startswith(("pissa", "olora", "corda", "loftq", "lora_ga"))


def _refused(code: str, field: str, value: object, reason: str) -> Invalid:
    shown = json.dumps(value, default=str)
    return Invalid(code, f"{CONFIG} has {field} = {shown[:80]}: {reason}.", field)


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor, without reading any."""
    path = folder / WEIGHTS
    with path.open("rb") as raw:
        length = int.from_bytes(raw.read(8), "little")
    if length > _MAX_HEADER_BYTES:
        raise Invalid(
            "adapter_damaged",
            f"{WEIGHTS} says that its header has {length:,} bytes, and an adapter's has at most {_MAX_HEADER_BYTES:,}. "
            "Save or upload the adapter again.",
            WEIGHTS,
        )
    try:
        with safe_open(path, framework="numpy") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
            shapes = {key: tuple(part.get_shape()) for key, part in slices.items()}
            dtypes = {key: part.get_dtype() for key, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise Invalid(
            "adapter_damaged", f"{WEIGHTS} cannot be read ({error}). Save or upload the adapter again.", WEIGHTS
        ) from error
    for key, dtype in dtypes.items():
        if dtype not in _DTYPES:
            raise Invalid("adapter_dtype", f"{key} is {dtype}; {', '.join(_DTYPES)} can be served.", WEIGHTS)
    return shapes


def _standard_key(key: str) -> str:
    found = _KEY.fullmatch(key)
    if found is None:
        reason = "it is no LoRA weight (…lora_A.weight or …lora_B.weight), and others cannot be served"
        if "modules_to_save" in key or "lora_magnitude" in key or "lora_embedding" in key:
            reason = "whole modules, DoRA magnitudes and embeddings beside the LoRA cannot be served"
        raise Invalid("adapter_tensor", f"{WEIGHTS} has the tensor {key}: {reason}.", WEIGHTS)
    *parents, leaf = found["module"].removeprefix(_PREFIX).split(".")
    if parents:
        parents[-1] = _PARENTS.get(parents[-1], parents[-1])
    path = ".".join([*parents, _LEAVES.get(leaf, leaf)])
    if path.startswith("layers."):
        path = f"model.{path}"
    return f"{_PREFIX}{path}.lora_{found['side']}.weight"


def _split(key: str) -> tuple[str, str]:
    """(module path, A or B) of a standard key."""
    module, _, side = key.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".lora_")
    return module, side


def _leaf(module: str) -> str:
    leaf = module.rsplit(".", 1)[-1]
    return _LEAVES.get(leaf, leaf)


def _check_tensors(shapes: Mapping[str, tuple[int, ...]], rank: int, targets: Any) -> list[str]:
    """The leaf names that the tensors adapt, sorted. Raises Invalid where they do not fit each other or the config."""
    pairs: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, shape in shapes.items():
        module, side = _split(key)
        pairs.setdefault(module, {})[side] = shape
    if not pairs:
        raise Invalid("adapter_mismatch", f"{WEIGHTS} has no tensors. Save the adapter again.", WEIGHTS)
    for module, sides in pairs.items():
        if set(sides) != {"A", "B"}:
            lacking = "B" if "A" in sides else "A"
            raise Invalid("adapter_mismatch", f"{module} has no lora_{lacking}. Save the adapter again.", WEIGHTS)
        if any(len(shape) != 2 for shape in sides.values()) or sides["A"][0] != rank or sides["B"][1] != rank:
            raise Invalid(
                "adapter_mismatch",
                f"{module} has lora_A {_times(sides['A'])} and lora_B {_times(sides['B'])}, {CONFIG} says r = {rank}. "
                "Upload the configuration that belongs to these weights.",
                WEIGHTS,
            )
    leaves = sorted({_leaf(module) for module in pairs})
    if isinstance(targets, list):
        named = {_leaf(str(target)) for target in targets}
        if named != set(leaves):
            raise Invalid(
                "adapter_mismatch",
                f"{CONFIG} names the modules {', '.join(sorted(named))}; the weights have {', '.join(leaves)}. Upload "
                "the configuration that belongs to these weights.",
                "target_modules",
            )
    return leaves


def _times(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


def _check_finite(path: Path) -> None:
    """Raise Invalid for weights that are NaN or infinite: whoever asked the adapter would get no probabilities."""
    with path.open("rb") as file:
        begin = 8 + int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(begin - 8))
        for key, entry in entries.items():
            if key == "__metadata__":
                continue
            word, mask = _DTYPES[entry["dtype"]]
            first, end = entry["data_offsets"]
            file.seek(begin + first)
            for at in range(first, end, _CHUNK_BYTES):
                words = np.frombuffer(file.read(min(_CHUNK_BYTES, end - at)), word)
                if ((words & mask) == mask).any():
                    raise Invalid(
                        "adapter_not_finite",
                        f"{key} has weights that are NaN or infinite, as a training that diverged leaves them. Train "
                        "it again at a lower learning rate, or upload an earlier checkpoint.",
                        WEIGHTS,
                    )


def _rename_tensors(path: Path, names: Mapping[str, str]) -> None:
    """Rewrite the header of a safetensors file (8 bytes of length, JSON, data) with other names; the data stay."""
    if len(set(names.values())) != len(names):
        raise Invalid("adapter_mismatch", f"{WEIGHTS} has the same module twice under two spellings.", WEIGHTS)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        renamed = json.dumps({names.get(key, key): entry for key, entry in header.items()}).encode()
        renamed += b" " * (-len(renamed) % 8)

        def write(part: Path) -> None:
            with part.open("wb") as output:
                output.write(len(renamed).to_bytes(8, "little") + renamed)
                shutil.copyfileobj(file, output)

        _replace(path, write)


# ---- against the engine ----------------------------------------------------------------------------------------------


def check(
    info: AdapterInfo, folder: Path, *, max_rank: int | None, modules: Sequence[str] | None, model_path: Path | None
) -> None:
    """Raise Invalid when the engine could not serve the adapter; what is None is not checked.

    max_rank and modules: the engine's limits; model_path: the served model's folder, to whose configuration every
    tensor's shape is compared.
    """
    if max_rank is not None and info.rank > max_rank:
        raise Invalid(
            "adapter_rank",
            f"The adapter's rank is {info.rank}, the engine serves up to {max_rank}. Train with r = {max_rank} or "
            f"less, or start the engine with engine.max_lora_rank = {info.rank}.",
            "r",
        )
    foreign = [module for module in info.target_modules if modules is not None and module not in modules]
    if foreign:
        raise Invalid(
            "adapter_modules",
            f"The adapter changes {', '.join(foreign)}; the engine serves LoRA on {', '.join(modules or ())}. Train "
            "with target_modules among these.",
            "target_modules",
        )
    if modules is not None and (lacking := alone(info.target_modules)):
        raise Invalid("adapter_modules", f"The adapter {lacking}. Train with both.", "target_modules")
    if model_path is not None:
        _check_base(info, folder, model_path)


def alone(modules: Sequence[str]) -> str | None:
    """In words, a module that the engine cannot serve without another one that is not among them; None: all is well."""
    for module, others in _TOGETHER.items():
        missing = [other for other in others if other not in modules]
        if module in modules and missing:
            return f"changes {module} without {' and '.join(missing)}, and the engine serves them as one weight"
    return None


def _check_base(info: AdapterInfo, folder: Path, model_path: Path) -> None:
    config = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    layers = int(config["num_hidden_layers"])
    expected = _projections(config)
    differing = []
    for key, shape in _shapes(folder).items():
        module, side = _split(key)
        layer = _LAYER.search(module)
        fan_in, fan_out = expected.get(_leaf(module), (None, None))
        of_base = fan_in if side == "A" else fan_out
        there = shape[1] if side == "A" else shape[0]
        if layer and int(layer[1]) >= layers:
            differing.append(f"{module} is in layer {layer[1]}, the model has {layers}")
        elif of_base is not None and there != of_base:
            differing.append(f"{module} has {there} {'inputs' if side == 'A' else 'outputs'}, the model {of_base}")
    if differing:
        trained_on = f" The adapter says that it was trained on {info.base_model}." if info.base_model else ""
        more = f" (and {len(differing) - 3} more)" if len(differing) > 3 else ""
        raise Invalid(
            "adapter_base",
            f"The adapter does not fit the served model {model_path.name}: {'; '.join(differing[:3])}{more}."
            f"{trained_on} Upload one that was trained on the served model.",
            "base_model_name_or_path",
        )


def _projections(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of the projections of a decoder of the Llama kind."""
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    width = int(config.get("head_dim") or hidden // heads)
    query, key_value = heads * width, int(config.get("num_key_value_heads") or heads) * width
    projections = {
        "q_proj": (hidden, query),
        "k_proj": (hidden, key_value),
        "v_proj": (hidden, key_value),
        "o_proj": (query, hidden),
        "qkv_proj": (hidden, query + 2 * key_value),
        "lm_head": (hidden, int(config["vocab_size"])),
    }
    # Experts have widths of their own.
    if not any("expert" in name for name in config) and config.get("intermediate_size"):
        inner = int(config["intermediate_size"])
        projections |= {
            "gate_proj": (hidden, inner),
            "up_proj": (hidden, inner),
            "gate_up_proj": (hidden, 2 * inner),
            "down_proj": (inner, hidden),
        }
    return projections
