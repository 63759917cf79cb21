"""The Hugging Face model over SGLang's tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.finetune.views import UnsupportedWeights, shared_model
from tests.finetune import small

IDS = torch.arange(1, 17)[None]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_logits_are_those_of_the_model_that_owns_its_weights(family: str, tied: bool, tmp_path: Path) -> None:
    original = small.model(family, tied=tied)
    shared = shared_model(small.Served(original), small.folder(original, tmp_path))
    torch.testing.assert_close(shared(IDS).logits, original(IDS).logits)


def test_no_parameter_owns_memory(tmp_path: Path) -> None:
    original = small.model()
    served = small.Served(original)
    shared = shared_model(served, small.folder(original, tmp_path))
    owned = {p.untyped_storage().data_ptr() for p in served.parameters()}
    assert all(p.untyped_storage().data_ptr() in owned for p in shared.parameters())


def test_a_change_of_the_served_weights_is_seen(tmp_path: Path) -> None:
    original = small.model()
    served = small.Served(original)
    shared = shared_model(served, small.folder(original, tmp_path))
    before = shared(IDS).logits
    with torch.no_grad():
        served.get_parameter("model.layers.0.self_attn.qkv_proj.weight").mul_(2.0)
    assert not torch.allclose(shared(IDS).logits, before)


def test_weights_under_lora_serving_have_another_name(tmp_path: Path) -> None:
    original = small.model()
    served = small.Served(original)
    attention = served.get_submodule("model.layers.0.self_attn")
    wrapped = torch.nn.Module()
    wrapped.base_layer = attention.qkv_proj
    attention.qkv_proj = wrapped
    shared = shared_model(served, small.folder(original, tmp_path))
    torch.testing.assert_close(shared(IDS).logits, original(IDS).logits)


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    original = small.model()
    original.config.architectures = ["GPT2LMHeadModel"]
    with pytest.raises(UnsupportedWeights, match="GPT2LMHeadModel") as refused:
        shared_model(small.Served(original), small.folder(original, tmp_path))
    assert refused.value.code == "unsupported_architecture"


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    original = small.model()
    served = small.Served(original)
    projection = served.get_submodule("model.layers.1.mlp.gate_up_proj")
    projection.weight = torch.nn.Parameter(projection.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedWeights, match=r"gate_up_proj.*int8"):
        shared_model(served, small.folder(original, tmp_path))


def test_a_slice_of_a_tensor_parallel_model_is_refused(tmp_path: Path) -> None:
    original = small.model()
    served = small.Served(original)
    projection = served.get_submodule("model.layers.0.self_attn.qkv_proj")
    projection.weight = torch.nn.Parameter(projection.weight[:32].clone(), requires_grad=False)
    with pytest.raises(UnsupportedWeights, match="tensor parallel"):
        shared_model(served, small.folder(original, tmp_path))
