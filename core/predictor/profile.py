"""A measured profile: what a device needed for decode steps and tasklets, as a file and its place in a cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from core.errors import Invalid, NotFound
from core.policy.types import Layout, TaskletKind

Kind = TaskletKind | Literal["mix"]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Machine(_Record):
    """What a profile is valid for: another value in any of these fields needs another profile."""

    gpu: str
    sms: int = Field(gt=0)
    driver: str
    model: str
    engine: str = Field(description="name and version, such as 'sglang 0.5.16'")
    dtype: str


class Point(_Record):
    """Decode steps of one size: `batch` requests (padded to the captured graph) with `kv_tokens` in all, the longest
    `max_kv`, alone (`beside` None) or next to tasklets of a kind, ``mix`` being all kinds in turn; median and p99 in ms
    """

    layout: Layout
    batch: int = Field(gt=0)
    kv_tokens: int = Field(gt=0)
    max_kv: int = Field(gt=0)
    beside: Kind | None = None
    ms: Positive
    p99_ms: Positive


class TaskletPoint(_Record):
    """Tasklets of one kind on the layout's finetune part, alone (`batch` 0) or next to decode steps of one size."""

    layout: Layout
    kind: TaskletKind
    batch: int = Field(0, ge=0)
    kv_tokens: int = Field(0, ge=0)
    ms: Positive
    p99_ms: Positive


class MicroBatch(_Record):
    """What the measured tasklets are of: tokens and LoRA rank of a micro-batch, and how many tasklets its forward (as
    its backward) and its head are cut into."""

    tokens: int = Field(gt=0)
    rank: int = Field(gt=0)
    layers: int = Field(gt=0)
    heads: int = Field(gt=0)


class Profile(_Record):
    """captured: batch sizes that have a decode graph; kv_heads: thread blocks per request in decode attention, which
    says in how many waves they run on a part of the SMs; micro_batch: None where it is not known; measured: date and
    program, for people."""

    machine: Machine
    captured: tuple[int, ...] = Field(min_length=1)
    kv_heads: int = Field(gt=0)
    points: tuple[Point, ...] = Field(min_length=1)
    tasklets: tuple[TaskletPoint, ...] = ()
    micro_batch: MicroBatch | None = None
    measured: str = ""

    @model_validator(mode="after")
    def _whole_is_there(self) -> Profile:
        if not any(point.layout.kind == "whole" and point.beside is None for point in self.points):
            raise ValueError("no point of layout 'whole' alone; every profile needs some")
        return self


def lacks(profile: Profile, layouts: Sequence[Layout], captured: Sequence[int], micro_batch: MicroBatch) -> str:
    """What an engine has that the profile of its machine was taken without; empty when it has everything."""
    missing = [str(layout) for layout in layouts if layout not in {point.layout for point in profile.points}]
    if missing:
        return f"layouts {', '.join(missing)}"
    if max(captured) > max(profile.captured):
        return f"batches of {max(captured)} (it goes to {max(profile.captured)})"
    if profile.micro_batch != micro_batch:
        return f"micro-batches of {micro_batch.tokens} tokens at rank {micro_batch.rank}"
    return ""


def cache_key(machine: Machine) -> str:
    """Sixteen hexadecimal digits that name the profile of this machine in the cache."""
    text = json.dumps(machine.model_dump(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_profile(path: Path, machine: Machine | None = None) -> Profile:
    """The profile in a file, for `machine` when that is given.

    Errors: `NotFound` when there is no such file, `Invalid` naming field and value when it is not a profile or one of
    another machine.
    """
    if not path.is_file():
        raise NotFound("no_profile", f"{path}: no such profile; `harli profile` makes one", "profile")
    try:
        profile = Profile.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "file"
        raise Invalid(
            "bad_profile", f"{path}: {where}: {first['msg']}; `harli profile` makes a new one", "profile"
        ) from error
    if machine is not None and machine != profile.machine:
        other = [
            f"{name} is {was!r} there and {now!r} here"
            for name, was in profile.machine.model_dump().items()
            if was != (now := getattr(machine, name))
        ]
        raise Invalid(
            "other_profile", f"{path}: of another machine: {', '.join(other)}; `harli profile` redoes it", "profile"
        )
    return profile


def write_profile(profile: Profile, folder: Path) -> Path:
    """Write a profile under its cache key; answers the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{cache_key(profile.machine)}.json"
    temporary = path.with_suffix(".part")
    temporary.write_text(profile.model_dump_json(exclude_defaults=True) + "\n")
    temporary.replace(path)
    return path
