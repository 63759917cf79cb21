"""The models that jobs may name: each is looked at once, and one that cannot be used says why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.config import FinetuneSettings, Settings
from core.errors import Invalid
from core.serving.bases import Bases
from tests.finetune import small


def folder(path: Path, layers: int = 5) -> Path:
    small.model(layers=layers).save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path


def bases(*paths: Path, window: int = 4, most_bytes: int | None = None) -> Bases:
    settings = Settings(finetune=FinetuneSettings(base_models=list(paths), window_layers=window))
    return Bases(settings, served="served", dtype=torch.float32, most_bytes=most_bytes)


def why(found: Bases, name: str) -> str:
    with pytest.raises(Invalid) as caught:
        found.get(name)
    assert (caught.value.code, caught.value.param) == ("base_model", "base_model")
    (told,) = [one for one in found.told() if one.name == name]
    assert told.refused is not None and told.refused in caught.value.message
    return told.refused


def test_a_listed_folder_is_a_base_by_its_name(tmp_path: Path) -> None:
    found = bases(folder(tmp_path / "one"), folder(tmp_path / "two", layers=3))
    assert [one.name for one in found] == ["one", "two"] and found.get("two").layers == 3
    one, two = found.told()
    assert (one.window_layers, two.window_layers) == (4, 3), "no more than it has layers"
    assert one.host_bytes > one.window_bytes > 0 and one.parameters == sum(
        p.numel() for p in small.model(layers=5).parameters()
    )


def test_one_that_cannot_be_used_says_why_and_the_others_go_on(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    bare = folder(tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    found = bases(tmp_path / "gone", empty, bare, folder(tmp_path / "served"), folder(tmp_path / "good"))
    assert [one.name for one in found] == ["good"]
    assert "there is no folder" in why(found, "gone") and "HARLI_FINETUNE__BASE_MODELS" in why(found, "gone")
    assert "no config.json" in why(found, "empty")
    assert "no tokenizer" in why(found, "bare")
    assert "is the name of the served model" in why(found, "served")


def test_of_two_folders_of_one_name_the_first_is_the_base(tmp_path: Path) -> None:
    found = bases(folder(tmp_path / "a" / "same", layers=3), folder(tmp_path / "b" / "same", layers=5))
    assert found.get("same").layers == 3 and len(found.told()) == 1


def test_one_whose_window_a_job_cannot_have_is_refused_with_what_would_do(tmp_path: Path) -> None:
    path = folder(tmp_path / "large")
    most = next(iter(bases(path))).window_bytes(2)
    assert "set HARLI_FINETUNE__WINDOW_LAYERS to 2 or less" in why(bases(path, most_bytes=most), "large")
    assert bases(path, window=2, most_bytes=most).get("large").layers == 5


def test_one_whose_captured_tasklets_a_job_cannot_have_is_refused_when_they_are_known(tmp_path: Path) -> None:
    path = folder(tmp_path / "large")
    found = bases(path, most_bytes=10**7)
    found.check_bytes(found.get("large"), 10**7)
    with pytest.raises(Invalid, match=r"take 11 MiB with the window .* a job can have 10 MiB; lower"):
        found.check_bytes(found.get("large"), 11_400_000)


def test_one_that_turns_out_not_to_do_is_refused_later(tmp_path: Path) -> None:
    found = bases(folder(tmp_path / "one"))
    found.refuse("one", "it has no place")
    assert why(found, "one") == "it has no place" and list(found) == []


def test_one_that_is_not_listed_is_refused_with_the_setting(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="it is not among the models that HARLI_FINETUNE__BASE_MODELS lists"):
        bases().get("other")
