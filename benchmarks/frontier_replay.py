"""What policies get at the frontier's targets on the steps that an H200 took: no GPU needed.

    python -m benchmarks.frontier_replay --runs frontier frontier_again

The simulator decodes the batches of a run of benchmarks/frontier.py, on a device made of the profile that the run took.
How long a step takes there is not drawn at random: it is the profile's time for its size, times what the run's step of
that layout, as long after the point's beginning, took of the trend of its point. So a clock's drop comes when it came,
and a layout whose steps scatter to one side does so here. The predictor is taught with the run's steps, point by point,
as in the benchmark, and goes from target to target, the longest first. The seeds differ in the up to 60 ms that the
recording is shifted by, and in which of the two steps before and after it may take a recorded one's place. hybrid goes
through it twice: up to the targets, as in the benchmark, and with the margin that an engine keeps from them.
"""

from __future__ import annotations

import argparse
import json
import pickle
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.frontier import PROMPT, SKIP, TARGETS
from benchmarks.frontier_page import FIXED, GOALS, best, recorded
from benchmarks.policy_measured import counted, layout_of, requests
from benchmarks.record import RESULTS, provenance, write
from core.policy import POLICIES, bind
from core.policy.types import WHOLE, Layout, TaskletKind
from core.predictor.two_stage import TwoStagePredictor
from core.simulate.command import Machine, machine
from core.simulate.device import HEAD_PARTS, Cell, Device, Program
from core.simulate.engine import Simulation
from core.simulate.scenario import Scenario

STEPS = 250
MARGIN = 0.05  # of an engine on a GPU as it is started (`core.config.FinetuneSettings`)
_SHIFT_MS = 60.0
_EXCHANGED = 2  # steps before and after the recorded one, any of which may take its place
_TREND = 2.0  # standard deviations within which a step is part of its point's trend


@dataclass(frozen=True)
class Recording:
    """The gaps of one fixed point, in ms: decode in `layout` at `batch`, its finetune part kept `busy` or not."""

    batch: int
    layout: Layout
    busy: bool
    gaps_ms: tuple[float, ...]

    def deviations(self) -> tuple[list[float], list[float]]:
        """ms since the point's beginning, and what each gap is of the trend: that of the gaps without the outliers, as
        the context grows."""
        gaps, steps = np.array(self.gaps_ms), np.arange(len(self.gaps_ms))
        off = gaps - np.polyval(np.polyfit(steps, gaps, 1), steps)
        usual = np.abs(off) < _TREND * off.std()
        trend = np.polyval(np.polyfit(steps[usual], gaps[usual], 1), steps)
        ratios = gaps / trend
        return np.cumsum(gaps).tolist(), (ratios / np.median(ratios)).tolist()


def recordings(path: Path) -> list[Recording]:
    """What a run of the frontier wrote of its fixed points."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [Recording(line["batch"], layout_of(line["layout"]), line["busy"], tuple(line["gaps_ms"])) for line in lines]


class RecordedDevice(Device):
    """A device whose steps deviate from the profile as the recorded ones did, as long after the beginning. What was not
    recorded deviates as the whole device's steps; what lasts longer than the recording, as its second half."""

    def __init__(self, steady: Device, recordings: Sequence[Recording]) -> None:
        super().__init__(steady.profile)
        self._deviations = {(one.batch, one.layout, one.busy): one.deviations() for one in recordings}
        self._random = np.random.default_rng(0)
        self._shift_ms = 0.0

    def begin(self, random: np.random.Generator) -> None:
        """A new point: the recordings start again, a little earlier or later."""
        self._random = random
        self._shift_ms = float(random.uniform(-_SHIFT_MS, _SHIFT_MS))

    def step(self, start_ms: float, layout: Layout, padded: int, kv_tokens: int, max_kv: int) -> Cell:
        cell = self.cell(layout, padded, kv_tokens, max_kv)
        alone = WHOLE if layout.kind == "confined" else layout
        return Cell(
            cell.alone_ms * self._deviation(padded, alone, False, start_ms),
            cell.beside_ms * self._deviation(padded, layout, True, start_ms),
            0.0,
            0.0,
            cell.speed,
        )

    def _deviation(self, batch: int, layout: Layout, busy: bool, start_ms: float) -> float:
        known = self._deviations.get((batch, layout, busy)) or self._deviations[batch, WHOLE, False]
        ends, ratios = known
        at, half = bisect_left(ends, start_ms + self._shift_ms), len(ratios) // 2
        at += int(self._random.integers(-_EXCHANGED, _EXCHANGED + 1))
        if at >= len(ratios):
            at = half + (at - half) % (len(ratios) - half)
        return ratios[max(at, 0)]


class Replay:
    """One run's recordings, and the machine that they were made on."""

    def __init__(self, run: str) -> None:
        """run: ``results/<run>.json``, with its ``_profile.json`` and ``_gaps.jsonl``."""
        self.rows: list[dict[str, Any]] = recorded(run)["rows"]
        self.recorded = recordings(RESULTS / f"{run}_gaps.jsonl")
        self._on: Machine = machine(str(RESULTS / f"{run}_profile.json"))
        self._device = RecordedDevice(self._on.device, self.recorded)
        self._program = Program(self._on.device, head_parts=HEAD_PARTS)
        self._taught = pickle.dumps(self._teach())

    def _teach(self) -> TwoStagePredictor:
        predictor = self._on.predictor()
        for one in self.recorded:
            for n, (ms, beside) in enumerate(zip(one.gaps_ms, self._beside(one), strict=True)):
                length = PROMPT + SKIP + n
                predictor.observe_step(one.layout, one.batch, one.batch * length, ms, beside, length)
        return predictor

    def _beside(self, one: Recording) -> list[TaskletKind | None]:
        """The kinds of tasklets that ran when the steps began, from what a micro-batch takes next to such steps."""
        if not one.busy:
            return [None] * len(one.gaps_ms)
        program = self._program
        speed = self._on.device.cell(one.layout, one.batch, one.batch * PROMPT, PROMPT).speed
        ends = list(accumulate(program.ms))
        begun = np.concatenate([[0.0], np.cumsum(one.gaps_ms)[:-1]]) * speed % program.total_ms
        return [program.kinds[bisect_right(ends, ms)] for ms in begun.tolist()]

    def run(self, policy: str, seed: int, margin: float = 0.0) -> Iterator[dict[str, Any]]:
        """All targets of all batches, with one predictor: batch, target_ms, p99_ms of the gaps and tokens_s. margin:
        share of each target that is not planned with."""
        predictor: TwoStagePredictor = pickle.loads(self._taught)
        random = np.random.default_rng(seed)
        for batch in dict.fromkeys(one.batch for one in self.recorded):
            for target in sorted(TARGETS[batch], reverse=True):
                self._device.begin(random)
                steps = SKIP + STEPS
                planned = target * (1 - margin)
                scenario = Scenario(requests(batch, steps), steps * 1.2 * target / 1e3, planned, seed=seed)
                simulation = Simulation(scenario, self._device, bind(policy), predictor, [self._program])
                gaps, tokens_s = counted(simulation, self._program, steps)
                p99_ms = sorted(gaps)[int(len(gaps) * 0.99)]
                yield {"batch": batch, "target_ms": target, "p99_ms": p99_ms, "tokens_s": tokens_s}


def summary(
    replay: Replay, policies: Sequence[str], seeds: int, margins: Sequence[float] = (0.0,)
) -> list[dict[str, Any]]:
    """A row for each policy and target: mean of the seeds' tokens/s and p99, in how many the target was held, and the
    run's best fixed point there. margins: those that hybrid keeps, one after another."""
    rows = []
    for policy, margin in [(one, kept) for one in policies for kept in (margins if one == "hybrid" else (0.0,))]:
        runs = [list(replay.run(policy, seed, margin)) for seed in range(seeds)]
        for alike in zip(*runs, strict=True):
            batch, target = alike[0]["batch"], alike[0]["target_ms"]
            fixed = best(replay.rows, batch, target, FIXED)
            rows.append(
                {
                    "policy": policy, "margin": margin, "batch": batch, "target_ms": target,
                    "goal": GOALS[batch].get(target),
                    "tokens_s": round(float(np.mean([one["tokens_s"] for one in alike]))),
                    "p99_ms": round(float(np.mean([one["p99_ms"] for one in alike])), 2),
                    "held": sum(one["p99_ms"] <= target for one in alike), "seeds": seeds,
                    "best_fixed_tokens_s": fixed.tokens_s if fixed else None,
                }
            )  # fmt: skip
    return rows


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument(
        "--runs", nargs="+", required=True, metavar="RUN", help="of results/RUN.json, RUN_profile.json, RUN_gaps.jsonl"
    )
    arguments.add_argument("--policies", nargs="+", choices=POLICIES, default=["hybrid", "harli", "tasklet_slices"])
    arguments.add_argument("--seeds", type=int, default=24)
    options = arguments.parse_args()
    rows = [
        {"run": run} | row
        for run in options.runs
        for row in summary(Replay(run), options.policies, options.seeds, (0.0, MARGIN))
    ]
    for row in rows:
        fixed = f"{row['best_fixed_tokens_s']:>6}" if row["best_fixed_tokens_s"] is not None else "  none"
        print(
            f"{row['run']} {row['policy']:<15} margin {row['margin']:.0%} bs {row['batch']:>3} "
            f"target {row['target_ms']:>4g} p99 {row['p99_ms']:6.2f} held {row['held']:>2} of {row['seeds']} "
            f"{row['tokens_s']:>6} tok/s, best fixed {fixed}"
        )
    write("frontier_replay", provenance("harli", "numpy") | {"rows": rows})


if __name__ == "__main__":
    main()
