from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import Invalid
from core.intake import adapter, merge
from core.intake.merge import Part

HIDDEN, LAYERS = 32, 2
MODULES = ("q_proj", "v_proj")


def weight(layer: int, module: str) -> str:
    return f"model.layers.{layer}.self_attn.{module}.weight"


def base(folder: Path, dtype: torch.dtype = torch.bfloat16, shards: int = 2) -> Path:
    """A model folder with one file per layer, and an index."""
    folder.mkdir()
    torch.manual_seed(0)
    index: dict[str, str] = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        tensors = {weight(layer, m): torch.randn(HIDDEN, HIDDEN).to(dtype) for layer in range(shard, LAYERS, shards)
                   for m in (*MODULES, "o_proj")}  # fmt: skip
        tensors[f"model.norm{shard}.weight"] = torch.randn(HIDDEN).to(dtype)
        save_file(tensors, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps({"hidden_size": HIDDEN}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "notes.bin").write_bytes(b"left out")
    return folder


def lora(folder: Path, rank: int = 4, alpha: float = 8, modules: tuple[str, ...] = MODULES, seed: int = 1) -> Path:
    folder.mkdir()
    torch.manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for module in modules:
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, HIDDEN)
            tensors[f"{name}.lora_B.weight"] = torch.randn(HIDDEN, rank)
    save_file(tensors, folder / "adapter_model.safetensors")
    config: dict[str, Any] = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(modules)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def delta(folder: Path, layer: int, module: str) -> torch.Tensor:
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
    if f"{name}.lora_A.weight" not in tensors:
        return torch.zeros(HIDDEN, HIDDEN)
    a, b = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
    return config["lora_alpha"] / config["r"] * (b @ a)


def whole(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_merged_model_is_the_base_with_the_change_added(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge, "CHUNK_BYTES", 1000)
    model, folder = base(tmp_path / "model", dtype), lora(tmp_path / "lora")
    seen: list[tuple[int, int]] = []
    merge.into_base(folder, model, tmp_path / "merged", progress=lambda done, total: seen.append((done, total)))
    before, after = whole(model), whole(tmp_path / "merged")
    assert before.keys() == after.keys()
    for layer in range(LAYERS):
        for module in MODULES:
            name = weight(layer, module)
            exact = before[name].float() + delta(folder, layer, module)
            # As rounding the exact sum does; another order of summing may fall on the other side.
            close = 2 * torch.finfo(dtype).eps
            torch.testing.assert_close(after[name].float(), exact.to(dtype).float(), rtol=close, atol=1e-5)
            assert after[name].dtype == dtype
    untouched = before.keys() - {weight(layer, module) for layer in range(LAYERS) for module in MODULES}
    assert all(torch.equal(before[name], after[name]) for name in untouched)
    names = {path.name for path in (tmp_path / "merged").iterdir()}
    assert names == {path.name for path in model.iterdir()} - {"notes.bin"}
    assert seen[-1][0] == seen[-1][1] == sum(path.stat().st_size for path in model.glob("*.safetensors"))


def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    values = torch.cat([torch.randn(2000), torch.tensor([float("inf"), -0.0, 1.00390625, 1.01171875, 3e38])])
    packed = merge.packed(values.numpy(), "BF16")
    assert packed == values.to(torch.bfloat16).view(torch.int16).numpy().tobytes()
    assert np.array_equal(merge.floats(packed, "BF16"), values.to(torch.bfloat16).float().numpy())
    assert np.isnan(merge.floats(merge.packed(np.array([np.nan], np.float32), "BF16"), "BF16")).all()


@pytest.mark.parametrize(
    ("at", "why"), [("lacks", "has no weight"), ("shape", "another model"), ("dtype", "stored as I8")]
)
def test_a_base_that_does_not_fit_is_named_and_nothing_is_written(tmp_path: Path, at: str, why: str) -> None:
    model, folder = base(tmp_path / "model", shards=1), lora(tmp_path / "lora")
    path = model / "model-00001-of-00001.safetensors"
    tensors = load_file(path)
    name = weight(1, "v_proj")
    changed = {"lacks": None, "shape": torch.zeros(8, 8), "dtype": torch.zeros(HIDDEN, HIDDEN, dtype=torch.int8)}[at]
    if changed is None:
        del tensors[name]
    else:
        tensors[name] = changed
    save_file(tensors, path)
    with pytest.raises(Invalid, match=why) as caught:
        merge.into_base(folder, model, tmp_path / "merged")
    assert name in caught.value.message
    assert not (tmp_path / "merged").exists()


def test_a_merge_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    def progress(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge.into_base(lora(tmp_path / "lora"), base(tmp_path / "model"), tmp_path / "merged", progress=progress)
    assert not (tmp_path / "merged").exists()


def test_several_adapters_add_up_exactly_with_their_weights(tmp_path: Path) -> None:
    first = lora(tmp_path / "first", rank=4, alpha=8)
    second = lora(tmp_path / "second", rank=2, alpha=3, modules=("q_proj",), seed=2)
    info = merge.combine([Part(first, 1.0), Part(second, -0.5)], tmp_path / "sum", max_rank=6)
    assert (info.rank, info.alpha, info.target_modules) == (6, 6.0, MODULES)
    for module in MODULES:
        wanted = delta(first, 1, module) - 0.5 * delta(second, 1, module)
        torch.testing.assert_close(delta(tmp_path / "sum", 1, module), wanted, rtol=1e-4, atol=1e-4)
    assert adapter.normalise(tmp_path / "sum").sha256 == info.sha256


def test_ranks_that_add_up_to_more_than_the_engine_serves_are_refused(tmp_path: Path) -> None:
    parts = [Part(lora(tmp_path / name, seed=seed), 1.0) for seed, name in enumerate("ab")]
    with pytest.raises(Invalid, match=r"The ranks 4 \+ 4 add up to 8, the engine serves up to 7") as caught:
        merge.combine(parts, tmp_path / "sum", max_rank=7)
    assert caught.value.param == "parts"
    assert not (tmp_path / "sum").exists()
