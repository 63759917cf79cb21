"""A Hugging Face folder as a base model that is not served: what its weights are, and how they come into host memory.

The folder's weights are named as the Hugging Face model names them; here they are fused as SGLang fuses them (q, k and
v; gate and up), layer by layer, since that is what the trainers compute with.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil
import torch
from safetensors import SafetensorError, safe_open

from core.errors import Invalid, Unavailable
from core.finetune.views import ARCHITECTURES
from core.memory.window import Block, HostWeights
from core.torchvision_ops import declare

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_LAYERS = "model.layers."
_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
# What some folders keep that no model of today reads.
_IGNORED = ("rotary_emb.inv_freq",)


class Weight(NamedTuple):
    """A tensor as it is computed with: `name` in SGLang's spelling, and the rows of each Hugging Face tensor in it, by
    name. Names within a layer are without the layer's own."""

    name: str
    shape: tuple[int, ...]
    rows: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class BaseFolder:
    """What `read` found out. `layer` has the weights of each of `layers` layers, `fixed` those of none; parameters:
    elements of all; shards: the file of each Hugging Face tensor."""

    path: Path
    config: PretrainedConfig
    dtype: torch.dtype
    layers: int
    layer: tuple[Weight, ...]
    fixed: tuple[Weight, ...]
    parameters: int
    shards: Mapping[str, Path]

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def layer_shapes(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [(weight.shape, self.dtype) for weight in self.layer]

    @property
    def fixed_shapes(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [(weight.shape, self.dtype) for weight in self.fixed]

    @property
    def host_bytes(self) -> int:
        """Of all weights, as they lie in host memory."""
        return self.layers * Block.of(self.layer_shapes).bytes + Block.of(self.fixed_shapes).bytes

    def window_bytes(self, slots: int) -> int:
        """Of a window of so many layers with what belongs to none."""
        return slots * Block.of(self.layer_shapes).bytes + Block.of(self.fixed_shapes).bytes


def read(path: Path, dtype: torch.dtype) -> BaseFolder:
    """Look at the folder's config and the headers of its weights; no weight is read. dtype: that they will be in.

    Raises `Invalid` for another architecture than the trainers know, quantised weights, and weights that are not those
    of the config.
    """
    declare()
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise _wrong("base_config", f"{path} is no Hugging Face model folder that can be read: {error}") from error
    architecture = (config.architectures or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise _wrong(
            "base_architecture", f"{path} is a {architecture}; finetuning knows {', '.join(ARCHITECTURES)}, use one"
        )
    if getattr(config, "quantization_config", None):
        raise _wrong("base_quantised", f"{path} is quantised; finetuning needs it in full precision")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    shards = _shards(path)
    _compare(path, expected, _headers(path, shards), tied=config.tie_word_embeddings)
    first = {name.removeprefix(f"{_LAYERS}0."): size for name, size in expected.items() if f"{_LAYERS}0." in name}
    return BaseFolder(
        path=path,
        config=config,
        dtype=dtype,
        layers=config.num_hidden_layers,
        layer=_fused(first),
        fixed=_fused({name: size for name, size in expected.items() if not name.startswith(_LAYERS)}),
        parameters=sum(torch.Size(size).numel() for size in expected.values()),
        shards=shards,
    )


def load(base: BaseFolder, device: torch.device) -> HostWeights:
    """Read all weights into host memory, page-locked where `device` is a GPU.

    Raises `Unavailable` when there is not as much memory, `Invalid` for a file that cannot be read to its end.
    """
    free = psutil.virtual_memory().available
    if base.host_bytes > free:
        raise Unavailable(
            "host_memory",
            f"base {base.name} takes {base.host_bytes / 2**30:.1f} GiB of host memory, of which {free / 2**30:.1f} GiB "
            "are free; finetune a smaller base, or make room on the engine's machine",
            "base_model",
        )
    layer, fixed = Block.of(base.layer_shapes), Block.of(base.fixed_shapes)
    host = HostWeights(base.layers, layer, fixed)
    places: dict[str, torch.Tensor] = {}
    for index, flat in enumerate(host.layers):
        places |= _places(base.layer, layer.tensors(flat), f"{_LAYERS}{index}.")
    places |= _places(base.fixed, fixed.tensors(host.fixed), "")
    try:
        for shard in dict.fromkeys(base.shards.values()):
            with safe_open(shard, framework="pt") as file, torch.inference_mode(False):
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    if name in places:
                        places[name].copy_(file.get_tensor(name))
        if device.type == "cuda":
            host.lock(device)
    except (OSError, SafetensorError) as error:
        host.close()
        raise _wrong("base_weights", f"{base.path} cannot be read: {error}; copy the folder again") from error
    except BaseException:
        host.close()
        raise
    return host


def _wrong(code: str, message: str) -> Invalid:
    return Invalid(code, message, "base_model")


def _fused(shapes: Mapping[str, tuple[int, ...]]) -> tuple[Weight, ...]:
    """Hugging Face's tensors, by name, as SGLang's; those that become one are neighbours among them."""
    made: dict[str, Weight] = {}
    for name, shape in shapes.items():
        module = name.rsplit(".", 2)[-2]
        fused = name.replace(module, _FUSED[module]) if module in _FUSED else name
        before = made.get(fused)
        rows = before.shape[0] if before is not None else 0
        parts = before.rows if before is not None else ()
        made[fused] = Weight(fused, (rows + shape[0], *shape[1:]), (*parts, (name, shape[0])))
    return tuple(made.values())


def _places(weights: Iterable[Weight], tensors: Iterable[torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Where each Hugging Face tensor goes."""
    places: dict[str, torch.Tensor] = {}
    for weight, tensor in zip(weights, tensors, strict=True):
        parts = torch.split(tensor, [rows for _, rows in weight.rows])
        places |= {prefix + name: part for (name, _), part in zip(weight.rows, parts, strict=True)}
    return places


def _shards(path: Path) -> dict[str, Path]:
    """The file of each tensor."""
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    try:
        if index.is_file():
            return {name: path / file for name, file in json.loads(index.read_bytes())["weight_map"].items()}
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as error:
        raise _wrong(
            "base_weights", f"{path} has no safetensors weights that can be read: {error}; copy the folder again"
        ) from error


def _headers(path: Path, shards: Mapping[str, Path]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor."""
    shapes: dict[str, tuple[int, ...]] = {}
    for shard in dict.fromkeys(shards.values()):
        try:
            with safe_open(shard, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    one = file.get_slice(name)
                    if one.get_dtype() not in ("F32", "F16", "BF16"):
                        raise _wrong(
                            "base_quantised",
                            f"{name} in {shard} is {one.get_dtype()}; finetuning needs float32, float16 or bfloat16",
                        )
                    shapes[name] = tuple(one.get_shape())
        except (OSError, SafetensorError) as error:
            raise _wrong("base_weights", f"{shard} cannot be read: {error}; copy {path.name} again") from error
    return shapes


def _compare(
    path: Path, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], *, tied: bool
) -> None:
    faults = []
    for name, shape in expected.items():
        if name not in found:
            faults.append(f"{name} is missing")
        elif found[name] != shape:
            faults.append(f"{name} is {list(found[name])} and has to be {list(shape)}")
    for name in found:
        of_head = tied and name == "lm_head.weight"
        if name not in expected and not of_head and not name.endswith(_IGNORED):
            faults.append(f"{name} is not known")
    if faults:
        more = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
        raise _wrong(
            "base_weights",
            f"the weights in {path} are not those of its config.json: {'; '.join(faults[:3])}{more}; copy the folder "
            "again",
        )
