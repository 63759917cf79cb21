"""Checkpoints: a folder that is either whole or not there. Safetensors and JSON, never pickle.

``<output_dir>/checkpoints/step-00000020/`` holds the adapter as peft writes it, ``optimizer.safetensors`` (fp32 masters
and moments) and ``state.json``: the sampler's position and figures. Random numbers need no state of their own, they are
functions of the seed and that position (`DropoutSeed`, `epoch_plan`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file

from core.errors import Invalid


class Progress(msgspec.Struct, kw_only=True):
    """Where a job stands, at an optimizer step's end. `fingerprint` ties it to the job's data and hyperparameters."""

    step: int = 0
    micro_batch: int = 0
    tokens: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    fingerprint: str = ""


def write(
    folder: Path, progress: Progress, optimizer: dict[str, torch.Tensor], save_adapter: Callable[[Path], None]
) -> Path:
    """Write a checkpoint under `folder` and return its path; a crash in mid-write leaves no half of one."""
    final = folder / f"step-{progress.step:08d}"
    partial = folder / f".{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_adapter(partial / "adapter")
    save_file(optimizer, partial / "optimizer.safetensors")
    (partial / "state.json").write_bytes(msgspec.json.encode(progress))
    for path in partial.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    return final


def read(folder: Path, fingerprint: str) -> tuple[Progress, dict[str, torch.Tensor]]:
    """The checkpoint in `folder`; raises `Invalid` when it is not one, or belongs to another job."""
    try:
        progress = msgspec.json.decode((folder / "state.json").read_bytes(), type=Progress)
        optimizer = load_file(folder / "optimizer.safetensors")
    except (OSError, msgspec.MsgspecError) as error:
        raise Invalid("checkpoint", f"{folder} is not a checkpoint that can be read: {error}", "resume_from") from error
    if progress.fingerprint != fingerprint:
        raise Invalid(
            "checkpoint",
            f"{folder} was made with other data or hyperparameters; start the job anew instead of resuming it",
            "resume_from",
        )
    return progress, optimizer


def prune(folder: Path, keep: int) -> None:
    """Keep the newest `keep` checkpoints under `folder`."""
    for old in sorted(folder.glob("step-*"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
