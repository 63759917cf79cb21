"""What a run shows: latencies, attainment, finetune throughput."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from core.policy.types import Layout
from core.simulate.batch import Request
from core.simulate.scenario import Scenario

if TYPE_CHECKING:
    from core.simulate.trainer import Trainer

Array = NDArray[np.float64]


@dataclass(slots=True)
class Steps:
    """One value per decode step: `end_ms`, `gap_ms` to the step before (waiting included), `ms` of the step itself,
    batch, place of its layout in `layouts`, tasklets, whether it outlasted its bound, what it was allowed."""

    end_ms: list[float] = field(default_factory=list)
    gap_ms: list[float] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)
    batch: list[int] = field(default_factory=list)
    layout: list[Layout] = field(default_factory=list)
    beside: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    missed: list[bool] = field(default_factory=list)
    slack_ms: list[float] = field(default_factory=list)
    stall_ms: list[tuple[float, int]] = field(default_factory=list)
    idle_ms: float = 0.0

    def add(
        self, end: float, gap: float, ms: float, batch: int, layout: Layout, beside: int, after: int, missed: bool,
        slack: float,
    ) -> None:  # fmt: skip
        """A decode step."""
        self.end_ms.append(end)
        self.gap_ms.append(gap)
        self.ms.append(ms)
        self.batch.append(batch)
        self.layout.append(layout)
        self.beside.append(beside)
        self.after.append(after)
        self.missed.append(missed)
        self.slack_ms.append(slack)

    def stall(self, ms: float, batch: int) -> None:
        """Prefill kept `batch` running requests waiting."""
        self.stall_ms.append((ms, batch))

    def idle(self, ms: float) -> None:
        """Finetuning with nothing to decode."""
        self.idle_ms += ms


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a run after its warm-up. Latencies in ms, rates per second, shares of 1.

    itl: gaps between two tokens, by tokens, without prefill stalls (`stall_p99_ms`); attainment: share of them (for a
    `tpot` target: of requests) within the target; tpot: per finished request from its first token; a
    request that was prefilled elsewhere has it when it joins the batch, and wait_p99_ms is how long it waited for that;
    ttft: None with prefill elsewhere; steps_over:
    share of decode steps over what they were allowed; miss_rate: share of the steps with finetuning that outlasted the
    predictor's bound; exclusive_share: finetune tokens of what the device would do without decode.
    """

    seconds: float
    steps: int
    requests: int
    finished: int
    batch_mean: float
    itl_p50_ms: float
    itl_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    wait_p99_ms: float
    stall_p99_ms: float | None
    attainment: float
    steps_over: float
    miss_rate: float
    planned_steps: int
    decode_tokens_s: float
    finetune_tokens_s: float
    exclusive_tokens_s: float
    exclusive_share: float
    layout_switches: int
    retractions: int
    lost_ms: float


@dataclass(slots=True)
class Outcome:
    """All that happened in a run. running, waiting: requests that were not done when it ended; warm_tokens: what was
    trained during the warm-up."""

    scenario: Scenario
    steps: Steps
    finished: list[Request]
    arrived: int
    running: int
    waiting: int
    retracted: int
    trainer: Trainer
    warm_tokens: float
    seconds: float
    exclusive_tokens_s: float

    def measured(self) -> list[Request]:
        """The finished requests that had their first token after the warm-up."""
        warm_ms = self.scenario.warmup_s * 1e3
        return [request for request in self.finished if request.first_ms >= warm_ms]

    def tpot_ms(self) -> Array:
        """Mean gap of each measured request of two tokens or more."""
        ended = [request for request in self.measured() if request.output_tokens > 1]
        return np.array([(request.last_ms - request.first_ms) / (request.output_tokens - 1) for request in ended])

    def gaps(self) -> tuple[Array, Array]:
        """The gap of each step after the warm-up, and its running requests."""
        warm = np.searchsorted(self.steps.end_ms, self.scenario.warmup_s * 1e3)
        return np.array(self.steps.gap_ms[warm:]), np.array(self.steps.batch[warm:], dtype=float)

    def summary(self) -> Summary:
        """The run's figures."""
        steps, target = self.steps, self.scenario.target_ms
        seconds = self.seconds - self.scenario.warmup_s
        gaps, batch = self.gaps()
        after_warmup = slice(len(steps.gap_ms) - len(gaps), None)
        tpot, measured = self.tpot_ms(), self.measured()
        here = self.scenario.prefill == "here"
        first = np.array([r.first_ms - r.arrival_s * 1e3 for r in measured]) if here else np.array([])
        wait = np.array([r.joined_ms - r.arrival_s * 1e3 for r in measured if np.isfinite(r.joined_ms)])
        stalls = np.array(steps.stall_ms).reshape(-1, 2)
        launched = np.array(steps.beside[after_warmup]) + np.array(steps.after[after_warmup])
        planned, missed = launched > 0, np.array(steps.missed[after_warmup], dtype=bool)
        layouts, slack = steps.layout[after_warmup], np.maximum(steps.slack_ms[after_warmup], 0.0)
        within = tpot <= target if self.scenario.target_kind == "tpot" else gaps <= target
        weights = np.ones_like(tpot) if self.scenario.target_kind == "tpot" else batch
        switches = sum(a is not b and a != b for a, b in pairwise(layouts))
        tokens_s = (self.trainer.tokens() - self.warm_tokens) / seconds
        return Summary(
            seconds=seconds,
            steps=len(gaps),
            requests=self.arrived,
            finished=len(measured),
            batch_mean=_share(batch.sum(), len(batch)),
            itl_p50_ms=weighted_quantile(gaps, batch, 0.5),
            itl_p99_ms=weighted_quantile(gaps, batch, 0.99),
            tpot_p50_ms=_quantile(tpot, 0.5),
            tpot_p99_ms=_quantile(tpot, 0.99),
            ttft_p50_ms=_quantile(first, 0.5) if here else None,
            ttft_p99_ms=_quantile(first, 0.99) if here else None,
            wait_p99_ms=_quantile(wait, 0.99),
            stall_p99_ms=weighted_quantile(stalls[:, 0], stalls[:, 1], 0.99) if here else None,
            attainment=_share((within * weights).sum(), weights.sum(), 1.0),
            steps_over=_share((gaps > slack).sum(), len(gaps)),
            miss_rate=_share((missed & planned).sum(), planned.sum()),
            planned_steps=int(planned.sum()),
            decode_tokens_s=float(batch.sum()) / seconds,
            finetune_tokens_s=tokens_s,
            exclusive_tokens_s=self.exclusive_tokens_s,
            exclusive_share=tokens_s / self.exclusive_tokens_s,
            layout_switches=switches,
            retractions=self.retracted,
            lost_ms=sum(run.lost_ms for run in (*self.trainer.runs, *self.trainer.done)),
        )


def weighted_quantile(values: Array, weights: Array, quantile: float) -> float:
    """The smallest value at or below which `quantile` of the weight lies; NaN without any."""
    if not weights.sum():
        return float("nan")
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reached, quantile * reached[-1])])


def _quantile(values: Array, quantile: float) -> float:
    return weighted_quantile(values, np.ones_like(values), quantile)


def _share(part: float, whole: float, empty: float = 0.0) -> float:
    return float(part) / float(whole) if whole else empty
