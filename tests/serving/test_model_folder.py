"""The served model's folder: the bundled model is usable as it is, a given folder is checked before anything starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from core import torchvision_ops
from core.config import EngineSettings, Settings
from core.errors import Invalid
from core.serving import model_folder

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole, tiny model folder."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "tokenizer.json").write_text("{}")
    save_file({"a.weight": np.ones((4, 4), np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


def refusal(folder: Path) -> Invalid:
    with pytest.raises(Invalid) as caught:
        model_folder.check(folder)
    assert caught.value.param == "engine.model"
    return caught.value


def test_bundled_model_ends_its_turn_and_keeps_its_chat_template(bundled_model: Path) -> None:
    torchvision_ops.declare()
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    tokenizer: Any = AutoTokenizer.from_pretrained(bundled_model)
    config = AutoConfig.from_pretrained(bundled_model)
    generation = GenerationConfig.from_pretrained(bundled_model)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end == 2
    assert [tokenizer.eos_token_id, config.eos_token_id, generation.eos_token_id] == [end, end, end]
    assert tokenizer.model_max_length == config.max_position_embeddings
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    model_folder.check(bundled_model)


def test_bundled_model_answers_and_stops(bundled_model: Path) -> None:
    torchvision_ops.declare()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(bundled_model)
    model: Any = AutoModelForCausalLM.from_pretrained(bundled_model)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**prompt, do_sample=False, max_new_tokens=40)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(tokens)
    assert tokens[-1] == tokenizer.eos_token_id


def test_a_converted_model_is_not_converted_again(bundled_model: Path) -> None:
    steps: list[str] = []
    settings = Settings(data_dir=bundled_model.parent.parent)
    assert model_folder.ensure(settings, lambda _fraction, step: steps.append(step)) == bundled_model
    assert steps == []


def test_the_bundled_model_is_absent_until_it_is_converted(tmp_path: Path) -> None:
    assert model_folder.location(Settings(data_dir=tmp_path)) is None


def test_what_can_be_served_can_be_finetuned() -> None:
    from core.finetune import views

    assert model_folder.ARCHITECTURES == views.ARCHITECTURES


def test_a_given_folder_is_used_as_it_is(folder: Path) -> None:
    settings = Settings(engine=EngineSettings(model=folder))
    assert model_folder.location(settings) == folder
    assert model_folder.ensure(settings) == folder


def test_a_folder_that_is_not_there_names_the_setting(tmp_path: Path) -> None:
    error = refusal(tmp_path / "nowhere")
    assert error.code == "model_missing"
    assert str(tmp_path / "nowhere") in error.message
    assert "HARLI_ENGINE__MODEL" in error.message


def gguf(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "small.gguf").write_bytes(b"GGUF")


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def list_config(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def encoder(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"architectures": ["BertModel"]}))


def no_architecture(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def quantised_config(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": {"quant_method": "awq"}}))


def quantised_tensor(folder: Path) -> None:
    save_file({"a.qweight": np.ones(4, np.int8)}, folder / "model.safetensors")


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def cut_off(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])


def empty_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def pointer_instead_of_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version 1\noid sha256:0\nsize 4\n")


def lost_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")


def broken_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        (gguf, "model_config", ["small.gguf", "converted"]),
        (broken_config, "model_config", ["config.json"]),
        (list_config, "model_config", ["config.json"]),
        (encoder, "model_architecture", ["BertModel", "LlamaForCausalLM"]),
        (no_architecture, "model_architecture", ["none"]),
        (quantised_config, "model_quantised", ["awq", "HARLI_ENGINE__MODEL"]),
        (quantised_tensor, "model_quantised", ["a.qweight", "I8"]),
        (pickled, "model_weights", ["model.safetensors", "safetensors"]),
        (cut_off, "model_weights", ["bytes", "copy it again"]),
        (empty_weights, "model_weights", ["0 bytes"]),
        (pointer_instead_of_weights, "model_weights", ["model.safetensors"]),
        (lost_shard, "model_weights", ["model-2.safetensors", "1 of 2"]),
        (broken_index, "model_weights", ["model.safetensors.index.json"]),
        (no_tokenizer, "model_tokenizer", ["tokenizer.json"]),
    ],
)
def test_a_folder_that_cannot_be_served_is_refused(
    folder: Path, damage: Callable[[Path], None], code: str, words: list[str]
) -> None:
    damage(folder)
    error = refusal(folder)
    assert error.code == code
    for word in [str(folder), *words]:
        assert word in error.message
