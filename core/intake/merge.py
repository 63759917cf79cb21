"""Adapters added up: several into one adapter, or one into its base model.

An adapter changes a projection's weight W by s·B·A, with s = alpha / rank. Several are one of the sum of their ranks
(their A above each other, their B side by side), exactly. Added to the base, every W becomes W + s·B·A: the base's
files are copied tensor by tensor and those that the adapter changes are written anew, a few rows at a time, so that
memory stays bounded however large the model is. No torch: bfloat16 is the upper half of a float32.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from core.errors import Invalid
from core.intake import adapter
from core.intake.adapter import CONFIG, WEIGHTS

CHUNK_BYTES = 8 << 20
_INDEX = "model.safetensors.index.json"
_SIZES = {"F32": 4, "F16": 2, "BF16": 2}
Floats = npt.NDArray[np.float32]
Progress = Callable[[int, int], None]


# ---- safetensors -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor in a safetensors file: where its bytes lie in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def header(path: Path) -> tuple[bytes, dict[str, Tensor]]:
    """(the file's first bytes up to the data, its tensors in the order of their data)."""
    with path.open("rb") as file:
        first = file.read(8)
        length = int.from_bytes(first, "little")
        raw = file.read(length)
    start = 8 + length
    entries = {name: entry for name, entry in json.loads(raw).items() if name != "__metadata__"}
    tensors = {
        name: Tensor(
            entry["dtype"], tuple(entry["shape"]), start + entry["data_offsets"][0], start + entry["data_offsets"][1]
        )
        for name, entry in entries.items()
    }
    return first + raw, dict(sorted(tensors.items(), key=lambda item: item[1].begin))


def floats(data: bytes, dtype: str) -> Floats:
    """Numbers as float32."""
    if dtype == "F32":
        return np.frombuffer(data, np.float32)
    if dtype == "F16":
        return np.frombuffer(data, np.float16).astype(np.float32)
    wide = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
    return wide.view(np.float32)


def packed(values: Floats, dtype: str) -> bytes:
    """float32 rounded to a dtype, to the nearest, ties to even as torch does."""
    if dtype == "F32":
        return np.ascontiguousarray(values).tobytes()
    if dtype == "F16":
        return values.astype(np.float16).tobytes()
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16).tobytes()


def _load(path: Path) -> dict[str, Floats]:
    _, tensors = header(path)
    found = {}
    with path.open("rb") as file:
        for name, tensor in tensors.items():
            file.seek(tensor.begin)
            found[name] = floats(file.read(tensor.end - tensor.begin), tensor.dtype).reshape(tensor.shape)
    return found


def _save(path: Path, tensors: Mapping[str, Floats]) -> None:
    """As float32."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, values in tensors.items():
        entries[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    head = json.dumps(entries).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for values in tensors.values():
            file.write(packed(values, "F32"))


# ---- several adapters ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """A stored adapter folder and its weight in the sum."""

    folder: Path
    weight: float


def combine(parts: Sequence[Part], destination: Path, *, max_rank: int | None) -> adapter.AdapterInfo:
    """Write the weighted sum of adapters of one base as an adapter folder, which must not exist: their changes of the
    weights add up exactly, and so do their ranks. What one adapts and another does not is padded with zeros.

    Raises Invalid when the ranks add up to more than `max_rank`.
    """
    configs = [json.loads((part.folder / CONFIG).read_text(encoding="utf-8")) for part in parts]
    ranks = [int(config["r"]) for config in configs]
    rank = sum(ranks)
    if max_rank is not None and rank > max_rank:
        raise Invalid(
            "adapter_rank",
            f"The ranks {' + '.join(map(str, ranks))} add up to {rank}, the engine serves up to {max_rank}. Merge "
            f"fewer, or start the engine with engine.max_lora_rank = {rank}.",
            "parts",
        )
    loaded = [_load(part.folder / WEIGHTS) for part in parts]
    modules = sorted({name.removesuffix(".lora_A.weight") for one in loaded for name in one if ".lora_A." in name})
    merged: dict[str, Floats] = {}
    for module in modules:
        first = next(one for one in loaded if f"{module}.lora_A.weight" in one)
        inputs, outputs = first[f"{module}.lora_A.weight"].shape[1], first[f"{module}.lora_B.weight"].shape[0]
        sides_a, sides_b = [], []
        for part, config, own, one in zip(parts, configs, ranks, loaded, strict=True):
            scaling = np.float32(part.weight * config["lora_alpha"] / own)
            sides_a.append(one.get(f"{module}.lora_A.weight", np.zeros((own, inputs), np.float32)))
            sides_b.append(one.get(f"{module}.lora_B.weight", np.zeros((outputs, own), np.float32)) * scaling)
        merged[f"{module}.lora_A.weight"] = np.concatenate(sides_a)
        merged[f"{module}.lora_B.weight"] = np.concatenate(sides_b, axis=1)
    destination.mkdir(parents=True)
    try:
        targets = sorted({name for config in configs for name in config["target_modules"]})
        # A scaling of 1: each part's own is in its B.
        config = configs[0] | {"r": rank, "lora_alpha": rank, "target_modules": targets, "use_rslora": False}
        (destination / CONFIG).write_text(json.dumps(config))
        _save(destination / WEIGHTS, merged)
        return adapter.normalise(destination)
    except BaseException:
        shutil.rmtree(destination, ignore_errors=True)
        raise


# ---- into the base ---------------------------------------------------------------------------------------------------


def into_base(folder: Path, model: Path, destination: Path, *, progress: Progress | None = None) -> None:
    """Write the base model `model` with the adapter of `folder` added as a model folder, which must not exist.

    `progress(bytes written, bytes in all)` may raise to cancel; then, and on any error, nothing is left. Raises Invalid
    when the base has no safetensors, lacks a weight that the adapter changes, or holds it in another form than float32,
    float16 or bfloat16.
    """
    shards = sorted(model.glob("*.safetensors"))
    index = model / _INDEX
    if index.is_file():
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        shards = [shard for shard in shards if shard.name in named]
    if not shards:
        raise Invalid("merge_base", f"The served model in {model} has no safetensors files to merge into.", "model")
    changes = _changes(folder)
    headers = {shard: header(shard) for shard in shards}
    _check(changes, {name: tensor for _, tensors in headers.values() for name, tensor in tensors.items()}, model)
    total = sum(shard.stat().st_size for shard in shards)
    destination.mkdir(parents=True)
    try:
        for path in sorted(model.iterdir()):
            if path.is_file() and path.suffix in (".json", ".jinja", ".txt", ".model"):
                shutil.copyfile(path, destination / path.name)
        written = _Written(progress, total)
        for shard, (head, tensors) in headers.items():
            with shard.open("rb") as source, (destination / shard.name).open("wb") as target:
                written.write(target, head)
                for name, tensor in tensors.items():
                    source.seek(tensor.begin)
                    if name in changes:
                        _write_changed(source, target, tensor, changes[name], written)
                    else:
                        _copy(source, target, tensor.end - tensor.begin, written)
    except BaseException:
        shutil.rmtree(destination, ignore_errors=True)
        raise


@dataclass(frozen=True, slots=True)
class _Change:
    """W += B · A. a: float32 [rank, inputs]; b: float32 [outputs, rank], scaled."""

    a: Floats
    b: Floats


def _changes(folder: Path) -> dict[str, _Change]:
    """By the name of the base's weight."""
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    scaling = config["lora_alpha"] / config["r"]
    changes = {}
    tensors = _load(folder / WEIGHTS)
    for name, a in tensors.items():
        if ".lora_A." in name:
            b: Floats = np.multiply(tensors[name.replace(".lora_A.", ".lora_B.")], scaling, dtype=np.float32)
            target = name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
            changes[target] = _Change(a, b)
    return changes


def _check(changes: Mapping[str, _Change], base: Mapping[str, Tensor], model: Path) -> None:
    for name, change in changes.items():
        tensor = base.get(name)
        if tensor is None:
            raise Invalid("merge_base", f"The model in {model} has no weight {name} that the adapter changes.", "model")
        if tensor.dtype not in _SIZES:
            raise Invalid(
                "merge_base",
                f"{name} of the model in {model} is stored as {tensor.dtype}; only {', '.join(_SIZES)} can be merged "
                "into. Merge into the model that it was quantised from.",
                "model",
            )
        if tensor.shape != (change.b.shape[0], change.a.shape[1]):
            raise Invalid(
                "merge_base",
                f"{name} is {'×'.join(map(str, tensor.shape))} in the model and {change.b.shape[0]}×"
                f"{change.a.shape[1]} in the adapter: it was trained on another model.",
                "model",
            )


class _Written:
    """Counts what is written, and tells."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def write(self, target: IO[bytes], data: bytes) -> None:
        target.write(data)
        self._done += len(data)
        if self._progress:
            self._progress(self._done, self._total)


def _copy(source: IO[bytes], target: IO[bytes], length: int, written: _Written) -> None:
    while length:
        data = source.read(min(CHUNK_BYTES, length))
        written.write(target, data)
        length -= len(data)


def _write_changed(source: IO[bytes], target: IO[bytes], tensor: Tensor, change: _Change, written: _Written) -> None:
    outputs, inputs = tensor.shape
    width = inputs * _SIZES[tensor.dtype]
    step = max(CHUNK_BYTES // (4 * inputs), 1)
    for begin in range(0, outputs, step):
        rows = min(step, outputs - begin)
        base = floats(source.read(rows * width), tensor.dtype).reshape(rows, inputs)
        delta: Floats = change.b[begin : begin + rows] @ change.a
        written.write(target, packed(base + delta, tensor.dtype))
