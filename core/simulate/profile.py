"""What a simulated device is made of, as a file: decode surfaces per layout, finetune speeds, noise and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from core.errors import Invalid, NotFound
from core.policy.types import Layout

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Surface(_Part):
    """A positive quantity over batch B and KV tokens K: ``base + per_request·B + per_kv_token·K`` times a factor that
    is interpolated between `points` (batch, context, factor), each a measured ÷ computed ratio."""

    base: NotNegative
    per_request: NotNegative = 0.0
    per_kv_token: NotNegative = 0.0
    points: tuple[tuple[Positive, Positive, Positive], ...] = ()


class LayoutProfile(_Part):
    """One way to split the SMs.

    alone_ms, beside_ms: a decode step without and next to finetuning; alone_tail, beside_tail: p99/p50 − 1 of the same;
    longest: attention of one request takes as long as that of so many of its length side by side, so that K is at least
    so many times the longest request (0 for an engine that splits long requests);
    speed, alone_speed: finetune work per unit of time on the finetune part (``whole``: on the whole device), next to
    decode and alone, in ms of the tasklets' own durations per ms; sharing: for tasklets of a second micro-batch that
    run on the whole device while this part works, the speeds of (whole device, part).
    """

    kind: Literal["whole", "split", "confined"]
    decode_sms: int = Field(ge=0)
    finetune_sms: int = Field(ge=0)
    alone_ms: Surface
    alone_tail: Surface
    beside_ms: Surface | None = None
    beside_tail: Surface | None = None
    speed: Surface | None = None
    alone_speed: Positive
    longest: NotNegative = 0.0
    sharing: tuple[Positive, Positive] | None = None

    @property
    def layout(self) -> Layout:
        return Layout() if self.kind == "whole" else Layout(self.kind, self.decode_sms, self.finetune_sms)


class TaskletProfile(_Part):
    """A micro-batch on the whole device: ms of each tasklet in order, forward layers, head (loss, then its gradient),
    backward layers, optimizer; and the arena pages that a running one and a waiting job hold. shorter: for
    micro-batches of fewer tokens, (tokens, ms relative to this one), since weights are read all the same; none: in
    proportion."""

    tokens: int = Field(gt=0)
    forward_ms: tuple[Positive, ...] = Field(min_length=1)
    head_ms: tuple[Positive, ...] = Field(min_length=1)
    backward_ms: tuple[Positive, ...] = Field(min_length=1)
    optimizer_ms: Positive
    shorter: tuple[tuple[Positive, Positive], ...] = ()
    activation_pages: int = Field(ge=0)
    state_pages: int = Field(ge=0)


class DeviceProfile(_Part):
    """A device with a model on it.

    noise: quantile function of (ms/median − 1)/(p99/median − 1), as (probability, value) pairs; arena_pages: pages of
    2 MiB that KV cache and finetuning share; provenance: where each figure comes from, for people.
    """

    device: str
    model: str
    sms: int = Field(gt=0)
    captured: tuple[int, ...] = Field(min_length=1, description="batch sizes with a captured decode graph")
    arena_pages: int = Field(gt=0)
    kv_bytes_per_token: int = Field(gt=0)
    prefill_ms_per_token: Positive
    prefill_ms_per_token_and_context: NotNegative = Field(0.0, description="attention: per token and context token")
    layouts: tuple[LayoutProfile, ...] = Field(min_length=1)
    tasklets: TaskletProfile
    noise: tuple[tuple[float, float], ...] = Field(min_length=2)
    provenance: dict[str, str] = {}


SHIPPED = Path(__file__).parent / "devices"


def read_profile(name: str | Path) -> DeviceProfile:
    """A device that ships with Harli (``h200``, ``ada6000``, ``a100``) or the file at a path.

    Errors: `NotFound` when it is neither; `Invalid` naming file, field, value and remedy when the file is not such a
    profile.
    """
    path = SHIPPED / f"{name}.json" if str(name) in shipped() else Path(name)
    if not path.is_file():
        raise NotFound(
            "no_device", f"{name}: no such device; give {', '.join(shipped())} or the path of a profile", "device"
        )
    try:
        return DeviceProfile.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "file"
        raise Invalid(
            "device_profile",
            f"{path}: {where} is {str(first['input'])[:80]!r}: {first['msg']}; make the profile again",
            "device",
        ) from error


def shipped() -> list[str]:
    """Names of the devices that ship with Harli."""
    return sorted(path.stem for path in SHIPPED.glob("*.json"))
