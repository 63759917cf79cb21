"""What the parts of benchmarks/policies.py share: windows of the traces, runs over five of them, their figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from core.policy.bound import BoundPolicy
from core.simulate.command import MISS, Machine, machine
from core.simulate.device import Device
from core.simulate.engine import Simulation
from core.simulate.outcome import Outcome, weighted_quantile
from core.simulate.scenario import Scenario
from core.workload.arrivals import Arrival
from core.workload.traces import cut, read_trace, thinned, within

FILES = {
    "azure_conv": "azure_conv.csv",
    "azure_code": "azure_code.csv",
    "mooncake": "mooncake_conversation_trace.jsonl",
}
TARGETS = (1.25, 1.5, 2.0, 4.0, 8.0)
SEEDS = range(5)
WINDOW_S = {"h200": 60.0, "ada6000": 120.0}  # of which the first quarter is warm-up
WARMUP = 0.25
# what fits: on the Ada6000 every fourth request of the mooncake trace; requests of over 32,768 tokens nowhere
EVERY = {("mooncake", "ada6000"): 4}
MAX_TOKENS = 32_768
HELD = 0.99  # share of the gaps within the target


def knobs_of(policy: str, device: Device) -> list[dict[str, Any]]:
    """The settings that are swept for a policy; each has one at least."""
    parts = sorted({layout.finetune_sms for layout in device.layouts if layout.kind == "split"})
    return {
        "static": [{"finetune_sms": part} for part in parts],
        "chunked": [{"chunk_tokens": 64}, {"chunk_tokens": 128}, {"chunk_tokens": 256}],
        "tasklet_slices": [{}, {"allowance": 0.0}],
        "harli_hysteresis": [{"high": high, "low": low} for high, low in ((1.0, 0.75), (0.9, 0.6), (0.8, 0.5))],
        "hybrid": [{}, {"hold": 4}, {"frugal": 1.0}, {"frugal": 0.08}],
    }.get(policy, [{}])


POLICIES = ("solo", "static", "step_slices", "chunked", "tasklet_slices", "harli", "harli_hysteresis", "hybrid")


@dataclass(frozen=True)
class Pool:
    """Five runs of one setting, one per window of the trace, taken together."""

    gaps: np.ndarray
    batch: np.ndarray
    tpot: np.ndarray
    waits: np.ndarray
    tokens_s: tuple[float, ...]
    exclusive: float
    missed: int
    planned: int
    layout_switches: int
    lost_ms: float

    def attainment(self, target_ms: float) -> float:
        return float((self.batch * (self.gaps <= target_ms)).sum() / self.batch.sum())

    def holds(self, target_ms: float) -> bool:
        """p99 of the gaps and p99 of the requests' mean gaps are within the target."""
        return self.attainment(target_ms) >= HELD and self.tpot_p99 <= target_ms

    @property
    def tpot_p99(self) -> float:
        return weighted_quantile(self.tpot, np.ones_like(self.tpot), 0.99)

    @property
    def itl_p99(self) -> float:
        return weighted_quantile(self.gaps, self.batch, 0.99)

    @property
    def mean_tokens_s(self) -> float:
        return float(np.mean(self.tokens_s))

    def row(self, target_ms: float) -> dict[str, Any]:
        return {
            "target_ms": round(target_ms, 2),
            "tpot_p50_ms": short(weighted_quantile(self.tpot, np.ones_like(self.tpot), 0.5)),
            "tpot_p99_ms": short(self.tpot_p99),
            "itl_p50_ms": short(weighted_quantile(self.gaps, self.batch, 0.5)),
            "itl_p99_ms": short(self.itl_p99),
            "wait_p99_ms": short(weighted_quantile(self.waits, np.ones_like(self.waits), 0.99)),
            "attainment": round(self.attainment(target_ms), 5),
            "steps_over": round(float((self.gaps > target_ms).mean()), 5),
            "holds": self.holds(target_ms),
            "miss_rate": round(self.missed / max(self.planned, 1), 5),
            "finetune_tokens_s": round(self.mean_tokens_s, 1),
            "tokens_s_of_seeds": [round(tokens) for tokens in self.tokens_s],
            "exclusive_share": round(self.mean_tokens_s / self.exclusive, 4),
            "layout_switches": self.layout_switches,
        }


def pooled(outcomes: Sequence[Outcome]) -> Pool:
    summaries = [outcome.summary() for outcome in outcomes]
    finished = [request for outcome in outcomes for request in outcome.measured()]
    return Pool(
        gaps=np.concatenate([outcome.gaps()[0] for outcome in outcomes]),
        batch=np.concatenate([outcome.gaps()[1] for outcome in outcomes]),
        tpot=np.concatenate([outcome.tpot_ms() for outcome in outcomes]),
        waits=np.array([r.joined_ms - r.arrival_s * 1e3 for r in finished if np.isfinite(r.joined_ms)]),
        tokens_s=tuple(summary.finetune_tokens_s for summary in summaries),
        exclusive=outcomes[0].exclusive_tokens_s,
        missed=round(sum(summary.miss_rate * summary.planned_steps for summary in summaries)),
        planned=sum(summary.planned_steps for summary in summaries),
        layout_switches=sum(summary.layout_switches for summary in summaries),
        lost_ms=sum(summary.lost_ms for summary in summaries),
    )


@dataclass(frozen=True)
class Bench:
    """Where the traces are and how much of them is simulated (1: all that the tables are made of)."""

    traces: Path
    scale: float = 1.0

    @cache  # noqa: B019  (one instance a process)
    def trace(self, name: str) -> list[Arrival]:
        return read_trace(self.traces / FILES[name])

    def windows(self, trace: str, device: str, every: int | None = None) -> list[list[Arrival]]:
        """Five parts of the trace, evenly spread over it, each as long as `WINDOW_S` says."""
        limit = min(MAX_TOKENS, machine(device).device.kv_tokens // 2)
        arrivals = within(thinned(self.trace(trace), every or EVERY.get((trace, device), 1)), limit)
        seconds, last = WINDOW_S[device] * self.scale, arrivals[-1].time_s
        starts = [(seed + 0.5) * (last - seconds) / len(SEEDS) for seed in SEEDS]
        return [cut(arrivals, start, seconds) for start in starts]

    def runs(
        self,
        windows: Sequence[Sequence[Arrival]],
        on: Machine,
        seconds: float,
        policy: BoundPolicy,
        target_ms: float,
        **more: Any,
    ) -> Pool:
        miss = more.pop("miss", MISS)
        programs = more.pop("programs", None)
        outcomes = []
        for seed, part in zip(SEEDS, windows, strict=True):
            scenario = Scenario(part, seconds, target_ms, warmup_s=WARMUP * seconds, seed=seed, **more)
            outcomes.append(Simulation(scenario, on.device, policy, on.predictor(miss), programs).run())
        return pooled(outcomes)


def merit(pool: Pool, target_ms: float) -> tuple[bool, float]:
    """Holding the target first, then throughput; where nothing holds, attainment."""
    held = pool.holds(target_ms)
    return held, pool.mean_tokens_s if held else pool.attainment(target_ms)


def short(value: float) -> float:
    return float(f"{value:.4g}")
