"""What was measured in an interval of time, kept raw so that any number of intervals adds up without loss.

Percentiles are of the raw values: the smallest value that at least the asked share of the weight does not exceed
(nearest rank). A gap weighs as many tokens as saw it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from core.api.schemas import Memory, TelemetryPoint
from core.link.messages import Telemetry

Values = npt.NDArray[np.float64]
_NONE: Values = np.empty(0)


@dataclass(frozen=True, slots=True)
class Weighted:
    """Values (ms) and the weight of each (tokens, or 1)."""

    values: Values
    weights: Values

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Weighted:
        array = np.asarray(pairs, dtype=np.float64).reshape(-1, 2)
        return cls(array[:, 0], array[:, 1])

    @classmethod
    def single(cls, values: Sequence[float]) -> Weighted:
        array = np.asarray(values, dtype=np.float64)
        return cls(array, np.ones(len(array)))

    @property
    def total(self) -> float:
        return float(self.weights.sum())

    def quantile(self, *shares: float) -> list[float | None]:
        """The values at the shares (0 to 1) of the weight; None without any weight."""
        total = self.total
        if total <= 0:
            return [None] * len(shares)
        order = np.argsort(self.values, kind="stable")
        cumulated = np.cumsum(self.weights[order])
        # A hair below, so that rounding in the sum does not push an exact rank to the next value.
        ranks = np.searchsorted(cumulated, np.asarray(shares) * total * (1 - 1e-12))
        return [float(value) for value in self.values[order][np.minimum(ranks, len(order) - 1)]]

    def within(self, limit: float) -> float:
        """Weight of the values that do not exceed `limit`."""
        return float(self.weights[self.values <= limit].sum())


@dataclass(frozen=True, slots=True)
class Interval:
    """`seconds` of measurements that end at `end` (Unix seconds).

    `judged` and `attained`: tokens of `itl` that a target applied to when they came, and those within it; `tenants`:
    the same two of each tenant that has a target of its own. Counters are of the interval; `energy_j` is what the GPU
    used in those `metered_s` seconds of it in which its power was told. `running` to `target_ms` (the tightest ITL
    target of everyone) are as of its end.
    """

    end: float
    seconds: float
    itl: Weighted
    stalls: Weighted
    ttft: Weighted
    tpot: Weighted
    judged: float = 0.0
    attained: float = 0.0
    tenants: dict[str, tuple[float, float]] = field(default_factory=dict)
    guard_pauses: int = 0
    guarded_s: float = 0.0
    decode_steps: int = 0
    decode_tokens: int = 0
    finetune_tokens: int = 0
    tasklets: int = 0
    busy_s: float = 0.0
    decode_s: float = 0.0
    finetune_s: float = 0.0
    energy_j: float = 0.0
    metered_s: float = 0.0
    after: float = 0.0
    beside: float = 0.0
    running: int = 0
    waiting: int = 0
    kv_used: int = 0
    kv_total: int = 0
    memory_bytes: int = 0
    plan: str = ""
    plan_reason: str = ""
    paused_reason: str | None = None
    memory: dict[str, Any] | None = None
    target_ms: float | None = None

    @property
    def start(self) -> float:
        return self.end - self.seconds


def of_message(message: Telemetry, itl_ms: Mapping[str | None, float]) -> Interval:
    """An engine's report, judged by the tightest ITL targets in force: by tenant, None for all other requests."""
    itl = Weighted.of(message.itl)
    own = {tenant: Weighted.of(pairs) for tenant, pairs in message.tenant_itl.items() if tenant in itl_ms}
    tenants = {tenant: (gaps.total, gaps.within(itl_ms[tenant])) for tenant, gaps in own.items()}
    judged = sum(total for total, _ in tenants.values())
    attained = sum(within for _, within in tenants.values())
    if (limit := itl_ms.get(None)) is not None:
        judged += itl.total - sum(gaps.total for gaps in own.values())
        attained += itl.within(limit) - sum(gaps.within(limit) for gaps in own.values())
    return Interval(
        end=message.time,
        seconds=message.interval_s,
        itl=itl,
        stalls=Weighted.of(message.stalls),
        ttft=Weighted.single(message.ttft_ms),
        tpot=Weighted.single(message.tpot_ms),
        judged=judged,
        attained=attained,
        tenants=tenants,
        guard_pauses=message.guard_pauses,
        guarded_s=message.guarded_s,
        decode_steps=message.decode_steps,
        decode_tokens=message.decode_tokens,
        finetune_tokens=message.finetune_tokens,
        tasklets=message.tasklets,
        busy_s=message.busy_share * message.interval_s,
        decode_s=message.decode_share * message.interval_s,
        finetune_s=message.finetune_share * message.interval_s,
        energy_j=(message.power_w or 0.0) * message.interval_s,
        metered_s=message.interval_s if message.power_w is not None else 0.0,
        after=message.plan.after * message.decode_steps,
        beside=message.plan.beside * message.decode_steps,
        running=message.running,
        waiting=message.waiting,
        kv_used=message.kv_used,
        kv_total=message.kv_total,
        memory_bytes=message.memory_bytes,
        plan=f"{message.plan.policy} {message.plan.layout}",
        plan_reason=message.plan.reason,
        paused_reason=message.paused_reason,
        memory=msgspec.to_builtins(message.memory),
        target_ms=itl_ms.get(None),
    )


_WEIGHTED = ("itl", "stalls", "ttft", "tpot")
_SUMMED = (
    "seconds", "judged", "attained", "decode_steps", "decode_tokens", "finetune_tokens", "tasklets", "busy_s",
    "decode_s", "finetune_s", "energy_j", "metered_s", "after", "beside", "guard_pauses", "guarded_s",
)  # fmt: skip
_summands = attrgetter(*_SUMMED)
_LAST = (
    "end", "running", "waiting", "kv_used", "kv_total", "memory_bytes", "plan", "plan_reason", "paused_reason",
    "memory",
    "target_ms",
)  # fmt: skip


def merge(intervals: Sequence[Interval]) -> Interval:
    """One interval of several (at least one), given in order of time."""
    merged: dict[str, object] = {name: getattr(intervals[-1], name) for name in _LAST}
    merged.update(zip(_SUMMED, map(sum, zip(*map(_summands, intervals), strict=True)), strict=True))
    for name in _WEIGHTED:
        parts: list[Weighted] = [getattr(interval, name) for interval in intervals]
        merged[name] = Weighted(
            np.concatenate([part.values for part in parts]), np.concatenate([part.weights for part in parts])
        )
    tenants: dict[str, tuple[float, float]] = {}
    for interval in intervals:
        for tenant, (judged, attained) in interval.tenants.items():
            sums = tenants.get(tenant, (0.0, 0.0))
            tenants[tenant] = sums[0] + judged, sums[1] + attained
    merged["tenants"] = tenants
    return Interval(**merged)  # type: ignore[arg-type]


def point(interval: Interval) -> TelemetryPoint:
    """The figures of an interval, for people and programs; `time` is its start."""
    seconds = max(interval.seconds, 1e-9)
    steps = max(interval.decode_steps, 1)
    itl_p50, itl_p99 = interval.itl.quantile(0.5, 0.99)
    (stall_p99,) = interval.stalls.quantile(0.99)
    ttft_p50, ttft_p99 = interval.ttft.quantile(0.5, 0.99)
    tpot_p50, tpot_p99 = interval.tpot.quantile(0.5, 0.99)
    return TelemetryPoint(
        time=datetime.fromtimestamp(interval.start, UTC),
        interval_s=interval.seconds,
        itl_p50_ms=itl_p50,
        itl_p99_ms=itl_p99,
        stall_p99_ms=stall_p99,
        ttft_p50_ms=ttft_p50,
        ttft_p99_ms=ttft_p99,
        tpot_p50_ms=tpot_p50,
        tpot_p99_ms=tpot_p99,
        attainment=interval.attained / interval.judged if interval.judged > 0 else None,
        decode_tokens_s=interval.decode_tokens / seconds,
        finetune_tokens_s=interval.finetune_tokens / seconds,
        batch=interval.decode_tokens / steps,
        running=interval.running,
        waiting=interval.waiting,
        kv_used=interval.kv_used,
        kv_total=interval.kv_total,
        busy_share=min(1.0, interval.busy_s / seconds),
        decode_share=min(1.0, interval.decode_s / seconds),
        finetune_share=min(1.0, interval.finetune_s / seconds),
        memory_bytes=interval.memory_bytes,
        power_w=interval.energy_j / interval.metered_s if interval.metered_s > 0 else None,
        plan=interval.plan,
        plan_after=interval.after / steps,
        plan_beside=interval.beside / steps,
        plan_reason=interval.plan_reason,
        paused_reason=interval.paused_reason,
        memory=Memory.model_validate(interval.memory) if interval.memory is not None else None,
        target_ms=interval.target_ms,
        guard_pauses=interval.guard_pauses,
        guarded_share=min(1.0, interval.guarded_s / seconds),
        tenant_attainment={
            tenant: attained / judged for tenant, (judged, attained) in interval.tenants.items() if judged > 0
        },
    )


def coarsen(interval: Interval) -> Interval:
    """The same with values rounded to three significant digits and equal ones counted together: small enough to keep
    for days, its percentiles exact to those digits."""
    return replace(
        interval,
        itl=_rounded(interval.itl),
        stalls=_rounded(interval.stalls),
        ttft=_rounded(interval.ttft),
        tpot=_rounded(interval.tpot),
    )


def _rounded(weighted: Weighted) -> Weighted:
    if not len(weighted.values):
        return weighted
    exponent = np.floor(np.log10(np.maximum(np.abs(weighted.values), 1e-6)))
    scale = 10.0 ** (2 - exponent)
    values, index = np.unique(np.round(weighted.values * scale) / scale, return_inverse=True)
    weights = np.bincount(index, weights=weighted.weights, minlength=len(values))
    return Weighted(values, weights.astype(np.float64))


def pack(interval: Interval) -> bytes:
    """For the store: msgpack, the values as little-endian float32."""
    fields: dict[str, object] = {name: getattr(interval, name) for name in (*_SUMMED, *_LAST, "tenants")}
    for name in _WEIGHTED:
        weighted: Weighted = getattr(interval, name)
        fields[name] = np.concatenate([weighted.values, weighted.weights]).astype("<f4").tobytes()
    return msgspec.msgpack.encode(fields)


def unpack(data: bytes) -> Interval:
    """What `pack` packed."""
    fields = msgspec.msgpack.decode(data)
    for name in _WEIGHTED:
        values = np.frombuffer(fields[name], dtype="<f4").astype(np.float64).reshape(2, -1)
        fields[name] = Weighted(values[0], values[1])
    return Interval(**fields)
