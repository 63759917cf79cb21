from __future__ import annotations

import gzip
import io
import json
import math
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from core import torchvision_ops
from core.errors import HarliError, Invalid, NotFound
from core.intake import adapter

LIMIT = 1 << 20
HIDDEN, QUERY, KEY_VALUE, INNER = 16, 16, 8, 24
WIDTHS = {
    "self_attn.q_proj": (HIDDEN, QUERY),
    "self_attn.v_proj": (HIDDEN, KEY_VALUE),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}
MODEL = {
    "hidden_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": INNER,
    "num_hidden_layers": 2, "vocab_size": 32,
}  # fmt: skip


def tensors(rank: int = 4, layers: int = 2, prefix: str = "base_model.model.model.layers") -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    made = {}
    for layer in range(layers):
        for module, (inputs, outputs) in WIDTHS.items():
            made[f"{prefix}.{layer}.{module}.lora_A.weight"] = random.normal(size=(rank, inputs)).astype(np.float32)
            made[f"{prefix}.{layer}.{module}.lora_B.weight"] = random.normal(size=(outputs, rank)).astype(np.float32)
    return made


def config(**changes: Any) -> dict[str, Any]:
    return {
        "peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "base_model_name_or_path": "acme/small",
        "target_modules": ["q_proj", "v_proj", "gate_proj", "down_proj"], "task_type": "CAUSAL_LM",
    } | changes  # fmt: skip


def write(folder: Path, weights: dict[str, np.ndarray] | None = None, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config(**changes)))
    save_file(tensors() if weights is None else weights, folder / "adapter_model.safetensors")
    return folder


def zipped(path: Path, folder: Path, under: str = "") -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for member in folder.iterdir():
            file.write(member, under + member.name)
    return path


def tarred(path: Path, folder: Path, mode: Any = "w:gz") -> Path:
    with tarfile.open(path, mode) as file:
        file.add(folder, "my-adapter")
    return path


def refused(source: Path, tmp_path: Path, *, max_bytes: int = LIMIT) -> Invalid:
    target = tmp_path / "stored" / "v1"
    with pytest.raises(Invalid) as caught:
        adapter.unpack(source, target, max_bytes=max_bytes)
    assert not target.exists()
    assert not target.parent.exists() or list(target.parent.iterdir()) == []
    return caught.value


# ---- what is taken ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "packed",
    [
        lambda root, folder: folder,
        lambda root, folder: zipped(root / "a.zip", folder),
        lambda root, folder: zipped(root / "a.zip", folder, "deep/er/"),
        lambda root, folder: tarred(root / "a.tar.gz", folder),
        lambda root, folder: tarred(root / "a.upload", folder, "w"),
    ],
    ids=["folder", "zip", "zip of a folder", "tar.gz", "tar"],
)
def test_folders_zips_and_tars_give_the_same_adapter(tmp_path: Path, packed: Callable[[Path, Path], Path]) -> None:
    source = packed(tmp_path, write(tmp_path / "source"))
    info = adapter.unpack(source, tmp_path / "stored" / "v1", max_bytes=LIMIT)
    assert (info.rank, info.alpha, info.use_rslora, info.base_model) == (4, 8.0, False, "acme/small")
    assert info.target_modules == ("down_proj", "gate_proj", "q_proj", "v_proj")
    assert info.sha256 == adapter.unpack(tmp_path / "source", tmp_path / "again", max_bytes=LIMIT).sha256
    stored = load_file(tmp_path / "stored" / "v1" / "adapter_model.safetensors")
    assert all(np.array_equal(stored[key], value) for key, value in tensors().items())
    assert info.bytes == sum(path.stat().st_size for path in (tmp_path / "stored" / "v1").iterdir())


def test_only_configuration_and_weights_are_kept(tmp_path: Path) -> None:
    folder = write(tmp_path / "source")
    write(folder / "checkpoint-10")
    (folder / "optimizer.pt").write_bytes(b"x")
    (folder / "README.md").write_text("x")
    adapter.unpack(folder, tmp_path / "v1", max_bytes=LIMIT)
    assert sorted(path.name for path in (tmp_path / "v1").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip


def test_peft_computes_the_same_with_what_is_stored(tmp_path: Path) -> None:
    torchvision_ops.declare()
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(**MODEL))
    trained = get_peft_model(
        base, LoraConfig(r=4, lora_alpha=6, use_rslora=True, target_modules=["q_proj", "v_proj", "down_proj"])
    )
    for name, parameter in trained.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    trained.save_pretrained(str(tmp_path / "source"))
    ids = torch.arange(8)[None]
    with torch.no_grad():
        expected = trained(ids).logits
    info = adapter.unpack(tmp_path / "source", tmp_path / "v1", max_bytes=LIMIT)
    modules = ["q_proj", "v_proj", "down_proj"]
    adapter.check(info, tmp_path / "v1", max_rank=4, modules=modules, model_path=model(tmp_path))
    loaded = PeftModel.from_pretrained(trained.unload(), str(tmp_path / "v1"))
    with torch.no_grad():
        assert torch.allclose(loaded(ids).logits, expected, atol=1e-6)


def test_rank_stabilised_scaling_goes_into_alpha(tmp_path: Path) -> None:
    # peft scales by alpha / sqrt(r) with use_rslora, the engine by alpha / r.
    info = adapter.normalise(write(tmp_path / "a", tensors(rank=8), r=8, lora_alpha=6, use_rslora=True))
    assert info.use_rslora
    assert info.alpha / info.rank == pytest.approx(6 / math.sqrt(8))
    stored = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (stored["use_rslora"], stored["lora_alpha"]) == (False, pytest.approx(6 * math.sqrt(8)))


def test_normalising_again_changes_nothing(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", use_rslora=True, target_modules=["wq", "wv", "w1", "w2"])
    first = adapter.normalise(folder)
    again = adapter.normalise(folder)
    assert (again.sha256, again.alpha) == (first.sha256, first.alpha)


@pytest.mark.parametrize(
    ("spelt", "modules"),
    [
        (("model.layers", "model.layers"), None),
        (("base_model.model.model.layers", "layers"), None),
        (("mlp.", "feed_forward."), ["q_proj", "v_proj", "feed_forward.gate_proj", "feed_forward.down_proj"]),
        (("self_attn.q_proj", "attention.wq"), ["attention.wq", "v_proj", "gate_proj", "down_proj"]),
        (("mlp.gate_proj", "feed_forward.w1"), ["q_proj", "v_proj", "w1", "down_proj"]),
        (("lora_A.weight", "lora_A.default.weight"), None),
        (("base_model.model.", ""), "all-linear"),
    ],
)
def test_other_spellings_become_the_standard_one(
    tmp_path: Path, spelt: tuple[str, str], modules: list[str] | str | None
) -> None:
    odd = {key.replace(*spelt): value for key, value in tensors().items()}
    folder = write(tmp_path / "a", odd, **({"target_modules": modules} if modules else {}))
    info = adapter.normalise(folder)
    assert info.target_modules == ("down_proj", "gate_proj", "q_proj", "v_proj")
    stored = load_file(folder / "adapter_model.safetensors")
    assert stored.keys() == tensors().keys()
    assert all(np.array_equal(stored[key], value) for key, value in tensors().items())


# ---- unsafe archives -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/x", "C:/x", "..\\x", "\\x"])
def test_a_zip_member_that_leads_out_refuses_the_archive(tmp_path: Path, name: str) -> None:
    source = zipped(tmp_path / "a.zip", write(tmp_path / "source"))
    with zipfile.ZipFile(source, "a") as file:
        file.writestr(name, b"x")
    error = refused(source, tmp_path)
    assert error.code == "archive_unsafe"
    assert "refused as a whole" in error.message
    assert repr(name) in error.message


@pytest.mark.parametrize("name", ["../x", "/etc/x"])
def test_a_tar_member_that_leads_out_refuses_the_archive(tmp_path: Path, name: str) -> None:
    source = tarred(tmp_path / "a.tar", write(tmp_path / "source"), "w")
    with tarfile.open(source, "a") as file:
        file.addfile(tarfile.TarInfo(name), io.BytesIO())
    assert refused(source, tmp_path).code == "archive_unsafe"


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices_refuse_a_tar(tmp_path: Path, kind: bytes) -> None:
    source = tarred(tmp_path / "a.tar", write(tmp_path / "source"), "w")
    with tarfile.open(source, "a") as file:
        member = tarfile.TarInfo("innocent")
        member.type, member.linkname = kind, "/etc/passwd"
        file.addfile(member)
    assert "is a link" in (message := refused(source, tmp_path).message) or "is a device" in message


def test_a_link_refuses_a_zip_and_a_folder(tmp_path: Path) -> None:
    folder = write(tmp_path / "source")
    source = zipped(tmp_path / "a.zip", folder)
    with zipfile.ZipFile(source, "a") as file:
        member = zipfile.ZipInfo("innocent")
        member.external_attr = (stat.S_IFLNK | 0o777) << 16
        file.writestr(member, "/etc/passwd")
    assert "'innocent' is a link" in refused(source, tmp_path).message
    (folder / "innocent").symlink_to("/etc/passwd")
    assert "'innocent' is a link" in refused(folder, tmp_path).message


def test_sizes_are_limited_before_unpacking(tmp_path: Path) -> None:
    source = tmp_path / "bomb.zip"
    with zipfile.ZipFile(source, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("zeros.safetensors", bytes(2 * LIMIT))
    assert source.stat().st_size < LIMIT // 10
    assert refused(source, tmp_path).code == "archive_too_large"
    bomb = tmp_path / "bomb.tar.gz"
    with tarfile.open(bomb, "w:gz") as file:
        member = tarfile.TarInfo("zeros.safetensors")
        member.size = 2 * LIMIT
        file.addfile(member, io.BytesIO(bytes(member.size)))
    assert refused(bomb, tmp_path).code == "archive_too_large"


def test_a_tar_header_that_claims_gigabytes_is_not_read(tmp_path: Path) -> None:
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, 4 << 30
    source = tmp_path / "a.tar.gz"
    with gzip.open(source, "wb", compresslevel=1) as file:
        file.write(header.tobuf())
        for _ in range(40):
            file.write(bytes(LIMIT))
    assert refused(source, tmp_path).code == "archive_too_large"


def test_a_damaged_archive_and_a_bare_file_are_told_apart_from_a_missing_one(tmp_path: Path) -> None:
    damaged = tmp_path / "a.tar.gz"
    damaged.write_bytes(tarred(tmp_path / "good.tar.gz", write(tmp_path / "source")).read_bytes()[:900])
    assert refused(damaged, tmp_path).code == "archive_damaged"
    assert refused(tmp_path / "source" / "adapter_model.safetensors", tmp_path).code == "archive_damaged"
    with pytest.raises(NotFound):
        adapter.unpack(tmp_path / "nothing", tmp_path / "v1", max_bytes=LIMIT)


# ---- what cannot be served -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"use_dora": True}, "adapter_use_dora", "DoRA scales the base weights per column"),
        ({"modules_to_save": ["lm_head"]}, "adapter_modules_to_save", "whole modules beside the LoRA"),
        ({"bias": "all"}, "adapter_bias", 'bias = "all"'),
        ({"rank_pattern": {"q_proj": 2}}, "adapter_rank_pattern", "one rank is served for all"),
        ({"alpha_pattern": {"q_proj": 2}}, "adapter_alpha_pattern", "one alpha is served for all"),
        ({"peft_type": "IA3"}, "adapter_kind", 'peft_type = "IA3": only LoRA'),
        ({"r": 0}, "adapter_rank", "r = 0"),
        ({"r": "8"}, "adapter_rank", 'r = "8"'),
        ({"lora_alpha": None}, "adapter_alpha", "lora_alpha = null"),
        ({"init_lora_weights": "pissa"}, "adapter_init_lora_weights", "belongs to a changed base model"),
        ({"init_lora_weights": "lora_ga"}, "adapter_init_lora_weights", "belongs to a changed base model"),
        ({"alora_invocation_tokens": [7]}, "adapter_alora_invocation_tokens", "counts behind these tokens only"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "adapter_layer_replication", "layers are there several times"),
        ({"use_qalora": True}, "adapter_use_qalora", "the engine computes plain LoRA"),
        ({"r": 8}, "adapter_mismatch", "lora_A 4×24 and lora_B 16×4, adapter_config.json says r = 8"),
        ({"target_modules": ["q_proj"]}, "adapter_mismatch", "names the modules q_proj; the weights have down_proj"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(
    tmp_path: Path, changes: dict[str, Any], code: str, said: str
) -> None:
    error = refused(write(tmp_path / "source", **changes), tmp_path)
    assert error.code == code
    assert said in error.message


@pytest.mark.parametrize(
    "key",
    [
        "base_model.model.lm_head.modules_to_save.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "base_model.model.model.layers.0.self_attn.q_proj.bias",
    ],
)
def test_a_tensor_beside_the_lora_is_named(tmp_path: Path, key: str) -> None:
    error = refused(write(tmp_path / "source", tensors() | {key: np.zeros((4, 16), np.float32)}), tmp_path)
    assert error.code == "adapter_tensor"
    assert key in error.message


def test_half_a_pair_is_named(tmp_path: Path) -> None:
    weights = tensors()
    del weights["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"]
    assert (
        "model.layers.1.mlp.down_proj has no lora_B" in refused(write(tmp_path / "source", weights), tmp_path).message
    )


def test_pickled_weights_are_never_loaded(tmp_path: Path) -> None:
    folder = write(tmp_path / "source")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    error = refused(folder, tmp_path)
    assert error.code == "adapter_pickle"
    assert "adapter_model.bin only, a pickle" in error.message
    assert "safe_serialization=True" in error.message


def test_damaged_weights_and_configuration_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "source")
    whole = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(whole[:-8])
    assert "adapter_model.safetensors cannot be read" in refused(folder, tmp_path).message
    (folder / "adapter_config.json").write_text('{"r": ')
    assert "adapter_config.json cannot be read" in refused(folder, tmp_path).message
    (folder / "adapter_config.json").unlink()
    assert "has no adapter_config.json" in refused(folder, tmp_path).message


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"r": 10**400}, "adapter_rank"),
        ({"lora_alpha": 10**400}, "adapter_alpha"),
        ({"lora_alpha": 1e308, "use_rslora": True}, "adapter_alpha"),
        ({"target_modules": ["\ud800"]}, "adapter_mismatch"),
    ],
)
def test_values_beyond_all_measure_are_refused_in_words(tmp_path: Path, changes: dict[str, Any], code: str) -> None:
    error = refused(write(tmp_path / "source", **changes), tmp_path)
    assert error.code == code
    assert error.message.encode()


@pytest.mark.parametrize(
    ("name", "kept"), [(["acme"], None), ({}, None), ("", None), ("a\ud800\0b", "a?b"), ("x" * 999, "x" * 255)]
)
def test_what_a_base_model_is_called_is_kept_as_a_name(tmp_path: Path, name: Any, kept: str | None) -> None:
    source = write(tmp_path / "source", base_model_name_or_path=name)
    assert adapter.unpack(source, tmp_path / "stored", max_bytes=LIMIT).base_model == kept


def test_a_header_that_claims_gigabytes_is_not_read(tmp_path: Path) -> None:
    source = write(tmp_path / "source")
    weights = source / "adapter_model.safetensors"
    weights.write_bytes((1 << 33).to_bytes(8, "little") + weights.read_bytes()[8:])
    assert "its header has 8,589,934,592 bytes" in refused(source, tmp_path).message


def test_damage_that_pythons_archives_trip_over_is_told_in_words(tmp_path: Path) -> None:
    folder = write(tmp_path / "source")
    packed = tmp_path / "a.zip"
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_LZMA) as file:
        for member in folder.iterdir():
            file.write(member, member.name)
    data = bytearray(packed.read_bytes())
    data[100:140] = bytes(40)
    packed.write_bytes(data)
    sparse = tmp_path / "a.tar"
    with tarfile.open(sparse, "w", format=tarfile.PAX_FORMAT) as file:
        entry = tarfile.TarInfo("adapter_config.json")
        entry.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.map": "x"}
        file.addfile(entry, io.BytesIO())
    number = tmp_path / "b.tar"
    with tarfile.open(number, "w", format=tarfile.PAX_FORMAT) as file:
        entry = tarfile.TarInfo("adapter_config.json")
        entry.pax_headers = {"GNU.sparse.size": "BINARY"}
        file.addfile(entry, io.BytesIO())
    assert [refused(source, tmp_path).code for source in (packed, sparse, number)] == ["archive_damaged"] * 3


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    weights = {key: value.astype(np.int8) for key, value in tensors().items()}
    assert refused(write(tmp_path / "source", weights), tmp_path).code == "adapter_dtype"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, value: float, kind: str) -> None:
    import torch
    from safetensors.torch import save_file as save_torch

    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    weights = {key: torch.from_numpy(one).to(dtype) for key, one in tensors().items()}
    folder = write(tmp_path / "source")
    key = next(iter(weights))
    largest = torch.finfo(dtype).max
    weights[key][1, 2] = largest
    save_torch(weights, folder / "adapter_model.safetensors")
    adapter.unpack(folder, tmp_path / "v1", max_bytes=LIMIT)
    weights[key][1, 2] = value
    save_torch(weights, folder / "adapter_model.safetensors")
    error = refused(folder, tmp_path)
    assert error.code == "adapter_not_finite" and key in error.message


def test_what_macos_writes_beside_the_weights_is_passed_over(tmp_path: Path) -> None:
    folder = write(tmp_path / "source")
    (folder / "adapter_model.safetensors").rename(folder / "model.safetensors")
    (folder / "._model.safetensors").write_bytes(b"Mac OS X")
    assert adapter.unpack(folder, tmp_path / "v1", max_bytes=LIMIT).rank == 4


def test_a_destination_that_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    with pytest.raises(Invalid, match="is there already"):
        adapter.unpack(write(tmp_path / "source"), tmp_path / "v1", max_bytes=LIMIT)


# ---- against the engine ----------------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path: Path) -> tuple[adapter.AdapterInfo, Path]:
    folder = write(tmp_path / "stored")
    return adapter.normalise(folder), folder


def model(tmp_path: Path, **changes: Any) -> Path:
    folder = tmp_path / "served-model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL | changes))
    return folder


def test_an_adapter_of_the_served_model_passes(stored: tuple[adapter.AdapterInfo, Path], tmp_path: Path) -> None:
    info, folder = stored
    adapter.check(info, folder, max_rank=4, modules=info.target_modules, model_path=model(tmp_path))
    adapter.check(info, folder, max_rank=None, modules=None, model_path=None)


def test_a_rank_above_the_limit_is_told_with_both(stored: tuple[adapter.AdapterInfo, Path]) -> None:
    with pytest.raises(Invalid, match="rank is 4, the engine serves up to 2"):
        adapter.check(*stored, max_rank=2, modules=None, model_path=None)


def test_a_module_that_is_served_as_one_with_another_needs_it() -> None:
    assert adapter.alone(["q_proj", "v_proj", "gate_proj", "o_proj", "down_proj"]) is None
    for modules, lacking in (
        (["q_proj"], "q_proj without v_proj"),
        (["k_proj", "q_proj"], "q_proj without v_proj"),
        (["k_proj"], "k_proj without q_proj and v_proj"),
        (["v_proj"], "v_proj without q_proj"),
        (["down_proj", "up_proj"], "up_proj without gate_proj"),
    ):
        assert lacking in str(adapter.alone(modules))


def test_modules_that_the_engine_does_not_serve_are_named(stored: tuple[adapter.AdapterInfo, Path]) -> None:
    with pytest.raises(Invalid, match="changes down_proj, gate_proj; the engine serves LoRA on q_proj, v_proj"):
        adapter.check(*stored, max_rank=None, modules=["q_proj", "v_proj"], model_path=None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 32, "head_dim": 4}, "mlp.down_proj has 16 outputs, the model 32"),
        ({"num_key_value_heads": 4}, "self_attn.v_proj has 8 outputs, the model 16"),
        ({"intermediate_size": 48}, "mlp.down_proj has 24 inputs, the model 48"),
        ({"num_hidden_layers": 1}, "is in layer 1, the model has 1"),
    ],
)
def test_another_base_model_is_told_by_the_shapes_that_differ(
    stored: tuple[adapter.AdapterInfo, Path], tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(Invalid) as caught:
        adapter.check(*stored, max_rank=None, modules=None, model_path=model(tmp_path, **changes))
    assert said in caught.value.message
    assert "does not fit the served model served-model" in caught.value.message
    assert "trained on acme/small" in caught.value.message


# ---- whatever is sent ------------------------------------------------------------------------------------------------


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
_configs = st.fixed_dictionaries(
    {},
    optional={
        "peft_type": st.just("LORA") | _values, "r": st.just(4) | _values, "lora_alpha": st.just(8) | _values,
        "target_modules": st.just(["q_proj"]) | _values, "bias": _values, "rank_pattern": _values,
        "use_rslora": _values, "base_model_name_or_path": _values, "init_lora_weights": _values,
    },
)  # fmt: skip
_names = st.sampled_from(
    ["adapter_config.json", "adapter_model.safetensors", "a/adapter_config.json", "../x", "/x", "a/../b", "x.bin", "\\"]
)


@given(
    config=_configs,
    header=st.dictionaries(
        st.sampled_from(["a.q_proj.lora_A.weight", "a.q_proj.lora_B.weight", "__metadata__", "x"]),
        st.fixed_dictionaries({"dtype": st.sampled_from(["F32", "BF16", "I8", "X"]), "shape": st.just([4, 8]) | _values,
                               "data_offsets": st.just([0, 128]) | _values}) | _values, max_size=4,
    ),
    others=st.dictionaries(_names, st.binary(max_size=8), max_size=2),
    cut=st.integers(0, 400),
)  # fmt: skip
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_archive_is_taken_or_refused_in_words(
    tmp_path: Path, config: dict[str, Any], header: dict[str, Any], others: dict[str, bytes], cut: int
) -> None:
    head = json.dumps(header).encode()
    members = {
        "adapter_config.json": json.dumps(config).encode(),
        "adapter_model.safetensors": len(head).to_bytes(8, "little") + head + b"\0" * 256,
        **others,
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    data = buffer.getvalue()
    source = tmp_path / "upload.zip"
    source.write_bytes(data if cut < 300 else data[: len(data) - cut + 300])
    destination = tmp_path / "stored"
    try:
        info = adapter.unpack(source, destination, max_bytes=1 << 20)
    except HarliError as error:
        assert error.message and error.code
        assert not destination.exists()
    else:
        assert info.rank > 0
        shutil.rmtree(destination)
