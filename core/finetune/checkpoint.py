"""Checkpoints: a folder that is either whole or not there. Safetensors and JSON, never pickle.

``<output_dir>/checkpoints/step-00000020/`` holds the adapter as peft writes it, ``optimizer.safetensors`` (fp32 masters
and moments) and ``state.json``: the sampler's position and figures. Random numbers need no state of their own, they are
functions of the seed and that position (`DropoutSeed`, `epoch_plan`). ``<output_dir>/evaluated/step-00000020/`` is the
adapter alone, as it was when it was evaluated after that step.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file

from core.errors import Invalid


class Progress(msgspec.Struct, kw_only=True):
    """Where a job stands, at an optimizer step's end. `fingerprint` ties it to the job's data and hyperparameters.

    `evaluated_at` is the step whose evaluation was taken in last (-1: none), `best_step` the one whose `best_loss` was
    the lowest, `stale` counts the evaluations since.
    """

    step: int = 0
    micro_batch: int = 0
    tokens: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    evaluated_at: int = -1
    best_step: int | None = None
    best_loss: float | None = None
    stale: int = 0
    fingerprint: str = ""


def write(
    folder: Path, progress: Progress, optimizer: dict[str, torch.Tensor], save_adapter: Callable[[Path], None]
) -> Path:
    """Write a checkpoint under `folder` and return its path; a crash in mid-write leaves no half of one."""
    final = folder / f"step-{progress.step:08d}"
    with _whole(final) as partial:
        partial.mkdir(parents=True)
        save_adapter(partial / "adapter")
        save_file(optimizer, partial / "optimizer.safetensors")
        (partial / "state.json").write_bytes(msgspec.json.encode(progress))
    return final


def evaluated(output_dir: Path, step: int) -> Path:
    """Where the adapter lies that was evaluated after `step`, if it was kept."""
    return output_dir / "evaluated" / f"step-{step:08d}"


def write_evaluated(output_dir: Path, progress: Progress, save_adapter: Callable[[Path], None]) -> Path:
    """Write the adapter that was evaluated last and return its folder. Of the older ones, the best one's stays, and
    those that a checkpoint remembers as the best, which a job that goes back to it may need again."""
    final = evaluated(output_dir, progress.evaluated_at)
    with _whole(final) as partial:
        partial.parent.mkdir(parents=True, exist_ok=True)
        save_adapter(partial)
    wanted = {progress.best_step}
    for state in (output_dir / "checkpoints").glob("step-*/state.json"):
        wanted.add(msgspec.json.decode(state.read_bytes(), type=Progress).best_step)
    kept = {evaluated(output_dir, step) for step in wanted if step is not None}
    # The one before may be in use: its samples are being made.
    for old in sorted(final.parent.glob("step-*"))[:-2]:
        if old not in kept:
            shutil.rmtree(old, ignore_errors=True)
    return final


@contextmanager
def _whole(final: Path) -> Iterator[Path]:
    """Where to write what is to be the folder `final` once all of it is on the disk; nothing of it stays otherwise."""
    partial = final.with_name(f".{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        yield partial
        for path in partial.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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
