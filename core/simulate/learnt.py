"""A device of which nothing is known but what an engine without a profile has seen: its own decode steps, by batch, and
its own tasklets, by kind, on the whole device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from core.errors import Invalid
from core.policy.types import WHOLE, TaskletKind
from core.predictor.moving import MovingPredictor
from core.simulate.device import KV_BLOCK_TOKENS, PAGE_BYTES, Device
from core.simulate.profile import DeviceProfile, LayoutProfile, Surface, TaskletProfile, read_profile

_NOISE_LIKE = "h200"
_WARM = 100  # observations of each duration that the predictor starts with
_MOST_TASKLETS = 512  # of an optimizer step; a longer one is told in parts
_LEAST_TAIL = 1e-6


@dataclass(frozen=True, slots=True)
class Learnt:
    """steps: (batch, mean ms, bound ms); tasklets: by kind (mean ms, bound ms); mix: tasklets of each kind in an
    optimizer step, which trains on `step_tokens` tokens."""

    device: str
    model: str
    steps: Sequence[tuple[int, float, float]]
    tasklets: Mapping[TaskletKind, tuple[float, float]]
    mix: Mapping[TaskletKind, float]
    step_tokens: float


class LearntMachine:
    """What `core.simulate.command.whatif` needs of a machine."""

    def __init__(self, learnt: Learnt, batch: int, kv_tokens: int) -> None:
        """batch, kv_tokens: of the load that is asked about. Errors: `Invalid` when a duration is missing."""
        kinds: tuple[TaskletKind, ...] = ("forward", "head", "backward", "optimizer")
        missing = [kind for kind in kinds if kind not in learnt.tasklets or not learnt.mix.get(kind)]
        if missing or not learnt.steps:
            what = ", ".join(missing) + " tasklets" if missing else "decode steps"
            raise Invalid("not_learnt", f"the engine has not run any {what} yet; ask again when it has", "learnt")
        self._learnt = learnt
        self.device = Device(_profile(learnt, batch, kv_tokens))
        self.notes = (
            f"from what the engine on {learnt.device} has measured of itself so far, in batches of "
            f"{', '.join(str(size) for size, *_ in learnt.steps)}; it has no profile, so that only the slack behind "
            "decode steps is used",
        )

    def predictor(self) -> MovingPredictor:
        """One that has seen each duration often, in its mean and as often at its bound as bounds are missed."""
        fresh = MovingPredictor()
        for turn in range(_WARM):
            for size, mean, bound in self._learnt.steps:
                fresh.observe_step(WHOLE, size, 0, bound if turn == _WARM // 2 else mean)
            for kind, (mean, bound) in self._learnt.tasklets.items():
                fresh.observe_tasklet(WHOLE, kind, bound if turn % 10 == 5 else mean)
        return fresh


def _profile(learnt: Learnt, batch: int, kv_tokens: int) -> DeviceProfile:
    sizes = np.array([size for size, *_ in learnt.steps], dtype=float)
    means = np.array([mean for _, mean, _ in learnt.steps])
    tails = [max(bound / mean - 1, _LEAST_TAIL) for _, mean, bound in learnt.steps]
    slope = max(0.0, float(np.polyfit(sizes, means, 1)[0])) if len(sizes) > 1 else 0.0
    base = max(0.0, float((means - slope * sizes).min()))
    context = max(1.0, kv_tokens / max(batch, 1))
    plane = base + slope * sizes
    points = tuple(
        (float(size), context, float(mean / over))
        for size, mean, over in zip(sizes, means, plane, strict=True)
        if over > 0
    )
    pages = ceil(4 * max(kv_tokens, KV_BLOCK_TOKENS) / KV_BLOCK_TOKENS) + 256
    scale = max(1.0, sum(learnt.mix.values()) / _MOST_TASKLETS)

    def durations(kind: TaskletKind) -> tuple[float, ...]:
        return (learnt.tasklets[kind][0],) * max(1, round(learnt.mix[kind] / scale))

    return DeviceProfile(
        device=learnt.device,
        model=learnt.model,
        sms=1,
        captured=tuple(range(1, max(batch, int(sizes.max())) + 1)),
        arena_pages=pages,
        kv_bytes_per_token=PAGE_BYTES // KV_BLOCK_TOKENS,
        prefill_ms_per_token=1.0,
        layouts=(
            LayoutProfile(
                kind="whole", decode_sms=0, finetune_sms=0, alone_speed=1.0,
                alone_ms=Surface(base=base, per_request=slope, points=points),
                alone_tail=Surface(base=float(np.mean(tails))),
            ),
        ),
        tasklets=TaskletProfile(
            tokens=max(1, round(learnt.step_tokens / scale)), forward_ms=durations("forward"),
            head_ms=durations("head"), backward_ms=durations("backward"),
            optimizer_ms=learnt.tasklets["optimizer"][0] * learnt.mix["optimizer"] / scale,
            activation_pages=0, state_pages=0,
        ),
        noise=read_profile(_NOISE_LIKE).noise,
        provenance={"decode, tasklets": "measured by the engine while it served", "noise": f"that of {_NOISE_LIKE}"},
    )  # fmt: skip
