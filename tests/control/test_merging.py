"""Sums of adapters as versions with parents; merged models as operations with a file."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from core.api import schemas
from core.control import adapters, merging, operations
from core.control.context import Control
from core.errors import Conflict, Invalid, Unavailable
from tests.control import files
from tests.stack import until


@pytest.fixture
def captain(control: Control, tmp_path: Path) -> schemas.Adapter:
    return adapters.upload(control, files.adapter(tmp_path / "captain"), "captain", False)


@pytest.fixture
def model(control: Control, tmp_path: Path) -> Path:
    """A served model that the adapters of `files` fit."""
    folder = tmp_path / "small"
    folder.mkdir()
    names = [f"model.layers.{n}.self_attn.{module}.weight" for n in range(2) for module in ("q_proj", "v_proj")]
    save_file({name: torch.zeros(32, 32, dtype=torch.bfloat16) for name in names}, folder / "model.safetensors")
    config = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64}
    (folder / "config.json").write_text(json.dumps(config))
    control.settings.engine.model = folder
    return folder


def test_a_sum_is_an_adapter_with_its_parents(control: Control, captain: schemas.Adapter) -> None:
    parts = [schemas.AdapterPart(adapter="captain@1"), schemas.AdapterPart(adapter="captain", weight=0.5)]
    made = merging.combine(control, "both", parts, False)
    (version,) = made.versions
    assert (version.origin, version.rank) == ("merged", 16)
    assert version.parents == ["captain@1*1", "captain@1*0.5"]
    with pytest.raises(Conflict, match="both already"):
        merging.combine(control, "both", parts, False)
    assert [v.version for v in merging.combine(control, "both", parts, True).versions] == [1, 2]
    assert list(control.uploads.iterdir()) == []


def test_a_merged_model_is_written_in_the_background_and_fetched_as_a_tar(
    control: Control, captain: schemas.Adapter, model: Path
) -> None:
    begun = merging.export(control, "captain", None)
    assert (begun.kind, begun.subject) == ("merge", "captain@1")
    until(lambda: operations.get(control, begun.id).state == "succeeded", what="the merge")
    content, size, name = merging.archive(control, begun.id)
    data = b"".join(content)
    assert (len(data), name) == (size, "small-captain-1.tar")
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert sorted(tar.getnames()) == [f"small-captain-1/{path.name}" for path in sorted(model.iterdir())]
        member = tar.extractfile("small-captain-1/config.json")
        assert member is not None
        assert member.read() == (model / "config.json").read_bytes()


def test_a_merge_that_cannot_be_done_says_why_and_leaves_nothing(
    control: Control, captain: schemas.Adapter, model: Path
) -> None:
    (model / "model.safetensors").unlink()
    begun = merging.export(control, "captain", 1)
    until(lambda: operations.get(control, begun.id).state == "failed", what="the merge")
    error = operations.get(control, begun.id).error
    assert error is not None
    assert (error.code, "no safetensors files" in error.message) == ("merge_base", True)
    with pytest.raises(Conflict, match="is failed; only a merge that succeeded has a file"):
        merging.archive(control, begun.id)
    assert not any(operations.folder(control, begun.id).glob("*"))


def test_without_a_model_there_is_nothing_to_merge_into(control: Control, captain: schemas.Adapter) -> None:
    with pytest.raises(Unavailable, match="no engine has been here yet"):
        merging.export(control, "captain", None)
    assert operations.page(control, None, 10) == []


def test_ranks_beyond_the_engines_are_refused(
    control: Control, captain: schemas.Adapter, connect: object, adapter_server: object
) -> None:
    from core.control import engines

    connect().hello(max_lora_rank=12)  # type: ignore[operator]

    def ready() -> bool:
        with control.store.read() as session:
            return engines.view(session).state == "ready"

    until(ready)
    with pytest.raises(Invalid, match="add up to 16, the engine serves up to 12"):
        merging.combine(control, "both", [schemas.AdapterPart(adapter="captain")] * 2, False)
