"""The predictor and the cost of a plan; the figures of docs/predictor.md.

    python -m benchmarks.predictor --grid profile_h200.json --traces DIR [--part fit --part stable ...] [--out FILE]

--grid is the recorded H200 profile (decode steps by layout, batch and context, alone and beside finetuning); DIR holds
azure_conv.csv (Azure LLM inference trace 2023). Parts: fit (half of the grid predicts the other), stable (100,000
simulated steps), drift (steps that suddenly take 20 % longer), broken (conditions that the fit does not know, for three
predictors), cost (microseconds of a plan), measuring (how many points a fit needs). All parts take about six minutes on
one core; the part `broken` needs scikit-learn.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.page import fill
from benchmarks.predictor_page import PAGE, figures
from benchmarks.record import RESULTS, provenance
from core.policy import POLICIES, bind
from core.policy.bound import BoundPolicy
from core.policy.types import WHOLE, Layout, Predictor, StepPlan, StepState, TaskletKind
from core.predictor.measuring import Size, measuring_plan
from core.predictor.nnls import nnls
from core.predictor.profile import Machine, Point, Profile
from core.predictor.quantile import QuantilePredictor
from core.predictor.two_stage import TwoStagePredictor
from core.simulate.command import machine
from core.simulate.device import Program
from core.simulate.engine import Simulation
from core.simulate.outcome import Outcome
from core.simulate.scenario import Scenario
from core.workload.arrivals import Arrival
from core.workload.traces import cut, read_trace

SEEDS = range(5)
TARGET_MS = 14.5  # twice the p99 of a step without finetuning under this load
Grid = Sequence[Point]
Array = NDArray[np.float64]
Say = Callable[[str], None]


def read_grid(path: Path) -> list[Point]:
    """The recorded grid as points of a profile."""
    points = []
    for row in json.loads(path.read_text())["rows"]:
        decode_sms = row["dec"] if row["layout"] == "split" else 0
        layout = WHOLE if row["layout"] == "whole" else Layout(row["layout"], decode_sms, row["ft"])
        points.append(
            Point(
                layout=layout, batch=row["bs"], kv_tokens=row["bs"] * row["ctx"], max_kv=row["ctx"],
                beside=row["beside"], ms=row["p50"], p99_ms=row["p99"],
            )
        )  # fmt: skip
    return points


def profile_of(points: Grid) -> Profile:
    """A profile of these points; tasklets are none of this benchmark's business."""
    h200 = Machine(gpu="H200", sms=132, driver="580", model="Llama-3-8B", engine="probe", dtype="bfloat16")
    captured = (1, 2, 4, 8, 12, *range(16, 257, 8))
    return Profile(machine=h200, captured=captured, kv_heads=8, points=tuple(points))


# ---- fit -------------------------------------------------------------------------------------------------------------


def fit(grid: Grid, say: Say) -> dict[str, Any]:
    """Half of the points, chosen at random, predicts the other half; five seeds."""
    rows: dict[str, list[tuple[float, float]]] = {"two_stage": [], "paper": []}
    worst: list[tuple[float, str]] = []
    for seed in SEEDS:
        order = np.random.default_rng(seed).permutation(len(grid))
        known, other = [grid[n] for n in order[: len(grid) // 2]], [grid[n] for n in order[len(grid) // 2 :]]
        for name, errors in (("two_stage", two_stage_errors(known, other)), ("paper", paper_errors(known, other))):
            sizes = np.abs(errors)
            rows[name].append((float(np.median(sizes)), float(np.quantile(sizes, 0.99))))
            say(f"fit: seed {seed} {name}: median {rows[name][-1][0]:.4f}, p99 {rows[name][-1][1]:.4f}")
            if name == "two_stage":
                worst += [(float(errors[n]), where(other[n])) for n in np.argsort(-sizes)[:2]]
    return {
        name: {
            "median_error": round(float(np.mean([median for median, _ in found])), 4),
            "p99_error": round(max(p99 for _, p99 in found), 4),
            "of_seeds": [{"median": round(median, 4), "p99": round(p99, 4)} for median, p99 in found],
        }
        for name, found in rows.items()
    } | {"worst": [{"error": round(e, 4), "at": at} for e, at in sorted(worst, key=lambda one: -abs(one[0]))[:5]]}


def two_stage_errors(known: Grid, other: Grid) -> Array:
    predictor = TwoStagePredictor(profile_of(known))
    predicted = [
        predictor.decode_ms(p.layout, p.batch, p.kv_tokens, p.max_kv, "forward" if p.beside else None) for p in other
    ]
    errors: Array = np.array(predicted) / np.array([p.ms for p in other]) - 1
    return errors


def paper_errors(known: Grid, other: Grid) -> Array:
    """The paper's formula: a plane in batch and KV tokens for each partition, and one φ beside finetuning."""

    def decode_on(point: Point) -> int:
        return point.layout.decode_sms if point.layout.kind == "split" else 132

    def columns(points: Grid) -> Array:
        return np.array([(1.0, p.batch, p.kv_tokens) for p in points])

    planes, phi = {}, {}
    for part in {decode_on(p) for p in [*known, *other]}:
        alone = [p for p in known if p.beside is None and decode_on(p) == part] or [p for p in known if not p.beside]
        ms = np.array([p.ms for p in alone])
        scale = np.array([5.0, 0.01, 3e-5])
        planes[part] = nnls(columns(alone) * scale / ms[:, None], np.ones(len(ms))) * scale
    for layout in {p.layout for p in other if p.beside}:
        beside = [p for p in known if p.beside and p.layout == layout]
        ratios = [p.ms / float(columns([p])[0] @ planes[decode_on(p)]) for p in beside]
        phi[layout] = float(np.median(ratios)) if ratios else 1.3
    predicted = [float(columns([p])[0] @ planes[decode_on(p)]) * (phi[p.layout] if p.beside else 1.0) for p in other]
    errors: Array = np.array(predicted) / np.array([p.ms for p in other]) - 1
    return errors


def where(point: Point) -> str:
    beside = "beside finetuning" if point.beside else "alone"
    return f"{point.layout}, {point.batch} requests of {point.max_kv} tokens, {beside}"


def measuring(grid: Grid, say: Say) -> list[dict[str, Any]]:
    """Fits to the points that the measuring plan chooses from the grid, judged by the others."""
    points = {Size(p.layout, p.batch, p.max_kv, p.beside is not None): p for p in grid}
    rows = []
    for tolerance in (0.05, 0.03, 0.02):
        chosen = set(measuring_plan(list(points), 132, tolerance=tolerance))
        errors = np.abs(
            two_stage_errors([points[s] for s in chosen], [p for s, p in points.items() if s not in chosen])
        )
        median, p99 = float(np.median(errors)), float(np.quantile(errors, 0.99))
        rows.append({"points": len(chosen), "median_error": round(median, 4), "p99_error": round(p99, 4)})
        say(f"measuring: {rows[-1]}")
    return rows


# ---- in the simulator ------------------------------------------------------------------------------------------------


class Watched:
    """A predictor whose bounds are compared with what steps took. learns: whether it is told of them; refit_every: of a
    predictor that is fitted again, after so many steps."""

    def __init__(self, predictor: Any, *, learns: bool = True, refit_every: int = 0) -> None:
        self._predictor = predictor
        self._learns = learns
        self._refit_every = refit_every
        self.refit_s = 0.0
        self.bound_over_step: list[float] = []
        self.decode_ms = predictor.decode_ms
        self.decode_upper_ms = predictor.decode_upper_ms
        self.tasklet_ms = predictor.tasklet_ms
        self.tasklet_mean_ms = predictor.tasklet_mean_ms
        self.observe_tasklet = predictor.observe_tasklet if learns else lambda *_, **__: None

    @property
    def stale(self) -> str:
        return str(self._predictor.stale)

    def observe_step(
        self,
        layout: Layout,
        padded: int,
        kv_tokens: int,
        ms: float,
        beside: TaskletKind | None = None,
        max_kv: int = 0,
    ) -> bool:
        self.bound_over_step.append(self.decode_upper_ms(layout, padded, kv_tokens, beside, max_kv) / ms)
        if not self._learns:
            return self.bound_over_step[-1] < 1
        missed = self._predictor.observe_step(layout, padded, kv_tokens, ms, beside, max_kv)
        if self._refit_every and len(self.bound_over_step) % self._refit_every == 0:
            began = time.process_time()
            self._predictor.refit()
            self.refit_s += time.process_time() - began
        return bool(missed)


def run(
    arrivals: Sequence[Arrival], seconds: float, predictor: Predictor, policy: BoundPolicy | None = None, **more: Any
) -> Outcome:
    """hybrid over a part of the trace on the simulated H200."""
    programs = more.pop("programs", None)
    scenario = Scenario(arrivals, seconds, TARGET_MS, **more)
    return Simulation(scenario, machine("h200").device, policy or bind("hybrid"), predictor, programs).run()


class Unwidened(TwoStagePredictor):
    """Without the factor that keeps the miss rate of the plans that run."""

    def observe_step(self, *measured: Any, **named: Any) -> bool:
        missed = super().observe_step(*measured, **named)
        self._widening = 1.0
        return missed


def part(trace: Sequence[Arrival], start_s: float, seconds: float) -> list[Arrival]:
    return cut(trace, start_s, seconds)


def stable(trace: Sequence[Arrival], say: Say) -> dict[str, Any]:
    """100,000 steps: how many outlast the bound of the plan that was chosen for them."""
    seconds = 1450.0
    outcome = run(part(trace, 0.0, seconds), seconds, machine("h200").predictor())
    missed = np.array(outcome.steps.missed[:100_000])
    trains = np.array([b > 0 for b in outcome.steps.beside[:100_000]])
    without = run(part(trace, 0.0, 200.0), 200.0, Unwidened(machine("h200").profile)).steps
    moved = np.array([a != b for a, b in zip(without.layout[1:], without.layout, strict=False)])
    per_10k = missed[: len(missed) // 10_000 * 10_000].reshape(-1, 10_000).mean(axis=1)
    answer = {
        "steps": len(missed),
        "miss_rate": round(float(missed.mean()), 5),
        "miss_rate_beside": round(float(missed[trains].mean()), 5),
        "miss_rate_first_1000": round(float(missed[:1000].mean()), 5),
        "miss_rate_per_10000": [round(float(rate), 5) for rate in per_10k],
        "attainment": round(outcome.summary().attainment, 5),
        "without_widening": {
            "steps": len(without.missed),
            "miss_rate": round(float(np.mean(without.missed)), 5),
            "miss_rate_after_a_change_of_layout": round(float(np.mean(np.array(without.missed[1:])[moved])), 5),
        },
    }
    say(f"stable: {answer}")
    return answer


def drift(trace: Sequence[Arrival], say: Say) -> dict[str, Any]:
    """Twenty runs in which decode steps take 20 % longer from a moment on. recovery_steps: after so many steps the miss
    rate of the next 200, over all runs, is under 2 %."""
    settle_s, after, runs = 25.0, 600, []
    for seed in range(20):
        outcome = run(
            part(trace, 150.0 * seed, settle_s + 15.0), settle_s + 15.0, machine("h200").predictor(),
            drift=((settle_s, 1.2),), seed=seed,
        )  # fmt: skip
        steps = outcome.steps
        first = int(np.searchsorted(steps.end_ms, settle_s * 1e3))
        trains = np.array(steps.beside) + np.array(steps.after) > 0
        runs.append(np.stack([steps.missed[first : first + after], trains[first : first + after]]).astype(float))
    missed, trains = np.mean(runs, axis=0)
    ahead = [float(missed[n : n + 200].mean()) for n in range(after - 200 + 1)]
    answer = {
        "recovery_steps": next(n for n, rate in enumerate(ahead) if rate < 0.02),
        "miss_rate_by_50": [round(float(rate), 4) for rate in missed.reshape(-1, 50).mean(axis=1)],
        "miss_rate_200_to_400": round(ahead[200], 4),
        "steps_with_finetuning_by_50": [round(float(rate), 3) for rate in trains.reshape(-1, 50).mean(axis=1)],
    }
    say(f"drift: {answer}")
    return answer


def broken(trace: Sequence[Arrival], say: Say) -> list[dict[str, Any]]:
    """Conditions that the fit does not know, and three predictors: fitted once and left alone, with the profile's p99
    as its margin; the two-stage predictor as it runs; and quantile regression, fitted again every 1,000 steps."""
    on = machine("h200")
    neighbour = tuple((10.0 * n, 1.25 if n % 2 else 1.0) for n in range(9))
    hot = tuple((20.0 + 0.5 * n, 1.0 + 0.02 * n) for n in range(21))
    conditions: dict[str, dict[str, Any]] = {
        "stable": {},
        "variable micro-batches": {
            "programs": [Program(on.device, head_parts=3, tokens=n) for n in (1024, 2048, 4096)]
        },
        "a neighbour every 10 s": {"drift": neighbour},
        "throttling to 1.4 times": {"drift": hot},
        "an adapter of higher rank": {"programs": [Program(on.device, head_parts=3, slower=1.3)]},
    }
    rows = []
    fitted = QuantilePredictor(on.profile)
    for condition, more in conditions.items():
        watched = {
            "fitted once": Watched(on.predictor(), learns=False),
            "two-stage": Watched(on.predictor()),
            "quantile regression": Watched(QuantilePredictor(on.profile), refit_every=1000),
        }
        for name, predictor in watched.items():
            outcome = run(part(trace, 600.0, 90.0), 90.0, predictor, **more)
            summary, ratios = outcome.summary(), np.array(predictor.bound_over_step[1000:])
            rows.append(
                {
                    "condition": condition,
                    "predictor": name,
                    "miss_rate": round(float((ratios < 1).mean()), 4),
                    "width": round(float(np.median(ratios[np.isfinite(ratios)]) - 1), 4),
                    "attainment": round(summary.attainment, 4),
                    "finetune_tokens_s": round(summary.finetune_tokens_s),
                    "refit_ms_per_step": round(1e3 * predictor.refit_s / len(predictor.bound_over_step), 3),
                }
            )
            say(f"broken: {rows[-1]}")
    half = Layout("split", 64, 68)
    for name, one in (("two-stage", on.predictor()), ("quantile regression", fitted)):
        rows.append(
            {
                "predictor": name,
                "look_up_us": microseconds(partial(one.decode_upper_ms, half, 32, 32_768, "forward", 1024)),
            }
        )
        say(f"broken: {rows[-1]}")
    return rows


def microseconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(20):
        began = time.process_time()
        for _ in range(1000):
            call()
        times.append((time.process_time() - began) * 1e3)
    return round(float(np.median(times)), 2)


def cost(trace: Sequence[Arrival], say: Say) -> dict[str, Any]:
    """Microseconds of the thread's own time for a plan in the states that a simulation of 30 s goes through. A plan is
    made three times, which is allowed since it depends on nothing but its arguments: the first one also pays for what
    else runs on the machine and the simulator between two plans (cold caches), the best of three does not."""
    answer: dict[str, Any] = {"load_average": round(os.getloadavg()[0], 1)}
    for name in POLICIES:
        policy = bind(name)
        first: list[float] = []
        best: list[float] = []

        def timed(
            state: StepState,
            predictor: Predictor,
            memory: Any,
            policy: BoundPolicy = policy,
            first: list[float] = first,
            best: list[float] = best,
        ) -> tuple[StepPlan, Any]:
            times = []
            for _ in range(3):
                began = time.thread_time()
                planned = policy.plan(state, predictor, memory)
                times.append((time.thread_time() - began) * 1e6)
            first.append(times[0])
            best.append(min(times))
            return planned

        run(
            part(trace, 300.0, 30.0), 30.0, machine("h200").predictor(),
            BoundPolicy(name, policy.knobs, policy.MEMORY, timed),
        )  # fmt: skip
        answer[name] = {
            "median_us": round(float(np.median(best)), 1),
            "p99_us": round(float(np.quantile(best, 0.99)), 1),
            "first_median_us": round(float(np.median(first)), 1),
        }
        say(f"cost: {name} {answer[name]}")
    return answer


PARTS: dict[str, Callable[[Any, Say], Any]] = {
    "fit": fit, "measuring": measuring, "stable": stable, "drift": drift, "broken": broken, "cost": cost
}  # fmt: skip
OF_GRID = ("fit", "measuring")  # the others are of the trace
HEAD = {
    "median_error": ("fit", "two_stage", "median_error"),
    "p99_error": ("fit", "two_stage", "p99_error"),
    "miss_rate": ("stable", "miss_rate"),
    "recovery_steps": ("drift", "recovery_steps"),
    "plan_us": ("cost", "hybrid", "median_us"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts and keep their figures in one file; a part that does not run keeps its last ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", type=Path, required=True)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--part", choices=list(PARTS), action="append")
    parser.add_argument("--out", type=Path, default=RESULTS / "predictor.json")
    given = parser.parse_args(arguments)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    body: dict[str, Any] = json.loads(given.out.read_text()) if given.out.is_file() else {}
    grid, trace = read_grid(given.grid), read_trace(given.traces / "azure_conv.csv")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    for name in given.part or PARTS:
        began = time.perf_counter()
        answer = PARTS[name](grid if name in OF_GRID else trace, say)
        made = provenance("numpy", "scikit-learn") | {"seconds": round(time.perf_counter() - began)}
        body[name] = (answer if isinstance(answer, dict) else {"rows": answer}) | {"made": made}
        head = {name: _at(body, path) for name, path in HEAD.items() if path[0] in body}
        origin = provenance("numpy", "scikit-learn")
        if given.part:  # which its own record tells of
            origin = {name: body.get(name, value) for name, value in origin.items()}
        written = head | origin | {name: body[name] for name in PARTS if name in body}
        given.out.write_text(json.dumps(written, indent=2) + "\n")
    if given.out == RESULTS / "predictor.json" and all(name in written for name in PARTS):
        fill(PAGE, figures(written))
    print(json.dumps(head, indent=2))


def _at(body: Any, path: Sequence[str]) -> Any:
    return _at(body[path[0]], path[1:]) if path else body


if __name__ == "__main__":
    main()
