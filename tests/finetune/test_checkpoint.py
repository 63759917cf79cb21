"""Checkpoints: whole or not there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.errors import Invalid
from core.finetune import checkpoint
from core.finetune.checkpoint import Progress


def write(folder: Path, step: int) -> Path:
    return checkpoint.write(
        folder,
        Progress(step=step, micro_batch=3 * step, fingerprint="f"),
        {"master.a": torch.full((2,), float(step))},
        lambda adapter: (adapter.mkdir(), (adapter / "adapter_config.json").write_text("{}")),
    )


def test_what_was_written_is_read(tmp_path: Path) -> None:
    progress, optimizer = checkpoint.read(write(tmp_path, 5), "f")
    assert (progress.step, progress.micro_batch) == (5, 15)
    assert torch.equal(optimizer["master.a"], torch.full((2,), 5.0))


def test_a_failure_in_mid_write_leaves_the_older_one(tmp_path: Path) -> None:
    older = write(tmp_path, 1)

    def fails(_: Path) -> None:
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        checkpoint.write(tmp_path, Progress(step=2, fingerprint="f"), {}, fails)
    assert sorted(tmp_path.glob("step-*")) == [older]


def test_a_step_may_be_written_again(tmp_path: Path) -> None:
    assert write(tmp_path, 1) == write(tmp_path, 1)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    paths = [write(tmp_path, step) for step in (1, 2, 10)]
    checkpoint.prune(tmp_path, keep=2)
    assert sorted(tmp_path.glob("step-*")) == paths[1:]


def test_a_folder_that_is_no_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="is not a checkpoint"):
        checkpoint.read(tmp_path, "f")
