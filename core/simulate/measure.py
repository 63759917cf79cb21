"""Between simulated devices and measured profiles: profile a simulated device as `harli profile` would a real one, and
make a simulated device of what `harli profile` wrote."""

from __future__ import annotations

from statistics import median

import numpy as np
from numpy.typing import NDArray

from core.errors import Invalid
from core.policy.types import WHOLE, Layout, TaskletKind
from core.predictor.profile import Machine, Point, Profile, TaskletPoint
from core.simulate.device import HEAD_PARTS, Device
from core.simulate.fit import longest_of, surface
from core.simulate.profile import DeviceProfile, LayoutProfile, Surface, TaskletProfile

GRID = (
    (1, 512), (1, 8192), (8, 512), (8, 4096), (8, 16384), (16, 1024), (32, 256), (32, 1024), (32, 4096), (64, 512),
    (64, 2048), (128, 256), (128, 1024), (128, 2048), (256, 256), (256, 1024),
    (1, 32768), (8, 32768), (16, 16384), (32, 16384), (64, 8192), (256, 2048),
)  # fmt: skip
_KINDS: tuple[TaskletKind, ...] = ("forward", "head", "backward", "optimizer")
_BESIDE = (1, 512), (32, 1024), (128, 1024)  # sizes next to which tasklets are timed
_SHORTEST = 1e-6
Array = NDArray[np.float64]


def profile_device(device: Device, head_parts: int = HEAD_PARTS) -> Profile:
    """The profile of a simulated device: decode steps at the sizes of the recorded grid, and six larger ones, as far as
    its memory goes, alone and beside a mix of tasklets, in each layout, and each kind of tasklet. Medians and p99 are
    those that the device has."""
    fitting = [(batch, context) for batch, context in GRID if batch * context <= device.kv_tokens]
    points: list[Point] = []
    tasklets: list[TaskletPoint] = []
    work = _work(device.profile.tasklets, head_parts)
    for layout in device.layouts:
        alone = device.alone_speed(layout)
        tasklets += [_tasklet(layout, kind, work[kind], alone) for kind in _KINDS]
        for batch, context in fitting:
            kv = batch * context
            cell = device.cell(layout, batch, kv, context)
            at = {"layout": layout, "batch": batch, "kv_tokens": kv, "max_kv": context}
            if layout.kind != "confined":  # with nothing beside it is the whole device
                points.append(Point(**at, ms=cell.alone_ms, p99_ms=cell.alone_ms * (1 + cell.alone_tail)))  # type: ignore[arg-type]
            if layout != WHOLE:
                p99 = cell.beside_ms * (1 + cell.beside_tail)
                points.append(Point(**at, beside="mix", ms=cell.beside_ms, p99_ms=p99))  # type: ignore[arg-type]
                if (batch, context) in _BESIDE:
                    tasklets += [_tasklet(layout, kind, work[kind], cell.speed, batch, kv) for kind in _KINDS]
    machine = Machine(
        gpu=device.profile.device, sms=device.profile.sms, driver="simulated", model=device.profile.model,
        engine="simulated", dtype="bfloat16",
    )  # fmt: skip
    return Profile(
        machine=machine, captured=device.profile.captured, kv_heads=8, points=tuple(points), tasklets=tuple(tasklets),
        measured="a simulated device",
    )  # fmt: skip


def device_of(
    profile: Profile,
    like: DeviceProfile,
    *,
    layers: int,
    micro_batch_tokens: int,
    arena_pages: int,
    kv_bytes_per_token: int,
) -> DeviceProfile:
    """A simulated device from a measured profile.

    layers, micro_batch_tokens: used where the profile does not say what its micro-batch was. It has no prefill, noise
    shape or memory: prefill is taken at the forward tasklets' speed, the noise and the pages per micro-batch token are
    those of `like`. A layout without points beside finetuning is left out. Errors: `Invalid` when the profile has no
    tasklets on the whole device.
    """
    durations = {t.kind: t.ms for t in profile.tasklets if t.layout == WHOLE and not t.batch}
    missing = [kind for kind in _KINDS if kind not in durations]
    if missing:
        raise Invalid(
            "bad_profile",
            f"profile of {profile.machine.gpu}: no {', '.join(missing)} tasklets on the whole device; "
            "`harli profile` makes a new one",
            "profile",
        )
    heads = 2 * HEAD_PARTS
    if (known := profile.micro_batch) is not None:
        layers, micro_batch_tokens, heads = known.layers, known.tokens, known.heads
    work: dict[TaskletKind, float] = {
        "forward": layers * durations["forward"],
        "head": heads * durations["head"],
        "backward": layers * durations["backward"],
        "optimizer": durations["optimizer"],
    }
    whole = _points(profile, WHOLE, beside=False)
    all_sms = longest_of(*_cells(whole))
    layouts = [
        LayoutProfile(
            kind="whole", decode_sms=0, finetune_sms=0, alone_ms=surface(*_cells(whole), all_sms),
            alone_tail=_tail(whole), longest=all_sms, alone_speed=1.0,
        )
    ]  # fmt: skip
    for layout in dict.fromkeys(point.layout for point in profile.points):
        both = _points(profile, layout, beside=True)
        if layout == WHOLE or not both:
            continue
        alone = _points(profile, layout, beside=False) or whole
        longest = longest_of(*_cells(alone))
        timed: dict[tuple[int, int], list[TaskletPoint]] = {}
        for t in profile.tasklets:
            if t.layout == layout:
                timed.setdefault((t.batch, t.kv_tokens), []).append(t)
        if not timed:
            continue
        speeds = {at: _speed(of, durations, work) for at, of in timed.items()}
        beside = {at: speed for at, speed in speeds.items() if at[0]}
        level = median((beside or speeds).values())
        layouts.append(
            LayoutProfile(
                kind=layout.kind, decode_sms=layout.decode_sms, finetune_sms=layout.finetune_sms,
                longest=longest, alone_ms=surface(*_cells(alone), longest), alone_tail=_tail(alone),
                beside_ms=surface(*_cells(both), longest), beside_tail=_tail(both),
                alone_speed=speeds.get((0, 0), level),
                speed=Surface(base=level, points=tuple((b, kv / b, s / level) for (b, kv), s in beside.items())),
            )
        )  # fmt: skip
    scale = micro_batch_tokens / like.tasklets.tokens
    entries = max(1, round(heads / HEAD_PARTS))  # each of which is cut into so many tasklets
    return DeviceProfile(
        device=profile.machine.gpu, model=profile.machine.model, sms=profile.machine.sms, captured=profile.captured,
        arena_pages=arena_pages, kv_bytes_per_token=kv_bytes_per_token, layouts=tuple(layouts), noise=like.noise,
        prefill_ms_per_token=layers * durations["forward"] / micro_batch_tokens,
        tasklets=TaskletProfile(
            tokens=micro_batch_tokens, forward_ms=(durations["forward"],) * layers,
            head_ms=(durations["head"] * heads / entries,) * entries, backward_ms=(durations["backward"],) * layers,
            optimizer_ms=durations["optimizer"], activation_pages=round(like.tasklets.activation_pages * scale),
            state_pages=like.tasklets.state_pages,
        ),
        provenance={
            "decode, tasklets": f"harli profile: {profile.measured or 'no date'}; {profile.machine.engine}, driver "
            f"{profile.machine.driver}, {profile.machine.dtype}",
            "noise, memory": f"those of {like.device}",
        },
    )  # fmt: skip


def _speed(timed: list[TaskletPoint], alone_ms: dict[TaskletKind, float], work: dict[TaskletKind, float]) -> float:
    """Speed at which a micro-batch goes, of which each kind of tasklet is so much work: the few milliseconds of a kind
    that is slowed otherwise than the rest hardly count."""
    kinds = {t.kind: t.ms for t in timed}
    return sum(work[kind] for kind in kinds) / sum(work[kind] * ms / alone_ms[kind] for kind, ms in kinds.items())


def _work(part: TaskletProfile, head_parts: int) -> dict[TaskletKind, list[float]]:
    return {
        "forward": list(part.forward_ms),
        "head": [ms / head_parts for ms in part.head_ms],
        "backward": list(part.backward_ms),
        "optimizer": [part.optimizer_ms],
    }


def _tasklet(
    layout: Layout, kind: TaskletKind, work: list[float], speed: float, batch: int = 0, kv_tokens: int = 0
) -> TaskletPoint:
    return TaskletPoint(
        layout=layout, kind=kind, batch=batch, kv_tokens=kv_tokens, ms=median(work) / speed, p99_ms=max(work) / speed
    )


def _points(profile: Profile, layout: Layout, *, beside: bool) -> list[Point]:
    return [p for p in profile.points if p.layout == layout and (p.beside is not None) == beside]


def _cells(points: list[Point]) -> tuple[Array, Array, Array]:
    """Batch, context and ms of each size that was measured; of the kinds of tasklets beside it the slowest counts."""
    cells: dict[tuple[int, int], float] = {}
    for p in points:
        at = p.batch, p.kv_tokens
        cells[at] = max(p.ms, cells.get(at, 0.0))
    batch = np.array([b for b, _ in cells], dtype=float)
    context = np.array([kv / b for b, kv in cells])
    return batch, context, np.array(list(cells.values()))


def _tail(points: list[Point]) -> Surface:
    return Surface(base=float(np.mean([max(p.p99_ms / p.ms - 1, _SHORTEST) for p in points])))
