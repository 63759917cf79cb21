"""Part of benchmarks/policies.py: what was measured on an H200 with SGLang, run again in the simulator."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.frontier import PROMPT, SKIP
from benchmarks.frontier_page import recorded
from benchmarks.policy_bench import SEEDS, Bench, short
from benchmarks.record import RESULTS
from core.policy import POLICIES, bind
from core.policy.bound import BoundPolicy
from core.policy.types import WHOLE, Layout, Predictor, StepPlan, StepState
from core.simulate.command import Load, Machine, endless, machine
from core.simulate.device import HEAD_PARTS, Program
from core.simulate.engine import Simulation
from core.simulate.scenario import FinetuneJob, Scenario
from core.workload.arrivals import Arrival

_AHEAD = 1.5  # of a step: so much is kept queued on a finetune part at a fixed point, 1 with tasklets behind the step
_NO_TARGET_MS = 1e6
# A job of which a policy is shown no more than the rest of the micro-batch, as by the engine of that run.
_JOB = FinetuneJob("job", tokens=10**12)


def measured(bench: Bench, say: Callable[[str], None]) -> dict[str, Any]:
    """The rows of the frontier, in which something was trained there or here. The simulated device and its predictor
    are made of the profile that the same run took (frontier_profile.json)."""
    on = machine(str(RESULTS / "frontier_profile.json"))
    program = Program(on.device, head_parts=HEAD_PARTS)
    found_there = recorded()["rows"]
    rows: list[dict[str, Any]] = []
    fixed: list[dict[str, Any]] = []
    for row in found_there:
        if row["policy"] in POLICIES and row["target_ms"]:
            runs = [_run(on, program, row, bind(row["policy"]), row["target_ms"], seed) for seed in SEEDS]
            kind, head = rows, {"target_ms": row["target_ms"], "policy": row["policy"]}
        elif row["finetune_tokens_s"] and row["policy"] != "random":
            plan = BoundPolicy("fixed", None, None, _fixed(on, program, row))
            runs = [_run(on, program, row, plan, _NO_TARGET_MS, seed) for seed in SEEDS]
            kind, head = fixed, {"layout": row["layout"], "after": row["after"]}
        else:
            continue
        gaps, tokens = zip(*runs, strict=True)
        found = {
            "batch": row["batch"], **head,
            "p50_ms": row["p50_ms"], "simulated_p50_ms": short(float(np.quantile(gaps, 0.5))),
            "p99_ms": row["p99_ms"], "simulated_p99_ms": short(float(np.quantile(gaps, 0.99))),
            "tokens_s": row["finetune_tokens_s"], "simulated_tokens_s": round(float(np.mean(tokens))),
        }  # fmt: skip
        if found["tokens_s"] or found["simulated_tokens_s"]:
            kind.append(found)
            say(f"measured: {found}")
    fixed.sort(key=lambda one: -_worst(one))
    return {
        "rows": rows,
        **_errors(rows),
        "fixed": {"points": len(fixed), **_errors(fixed), "worst": fixed[:5]},
        "behind": _behind(found_there),
    }


def _errors(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    p50 = np.abs([row["simulated_p50_ms"] / row["p50_ms"] - 1 for row in rows])
    return {
        "p50_error_median": round(float(np.median(p50)), 4),
        "tokens_error_median": round(float(np.median([_tokens_error(row) for row in rows])), 4),
        "within_15_percent": sum(_worst(row) <= 0.15 for row in rows),
    }


def _tokens_error(row: dict[str, Any]) -> float:
    return float(abs(row["simulated_tokens_s"] / max(row["tokens_s"], 1) - 1))


def _worst(row: dict[str, Any]) -> float:
    return max(float(abs(row["simulated_p50_ms"] / row["p50_ms"] - 1)), _tokens_error(row))


def _behind(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """How many ms of slack the engine's time slices kept for each tasklet behind a step, at the least, and how many one
    took where their number was fixed."""
    kept = [
        (row["target_ms"] - row["solo_p99_ms"]) * (row["steps"] + SKIP) / row["after_mean"]
        for row in rows
        if row["policy"] == "tasklet_slices" and row["finetune_tokens_s"]
    ]
    took = [(row["p50_ms"] - row["solo_p50_ms"]) / row["after"] for row in rows if row["policy"] == "slices"]
    return {"kept_ms": round(min(kept), 2), "took_ms": round(float(np.median(took)), 2)}


def layout_of(text: str) -> Layout:
    """The layout that is written so."""
    part = re.match(r"\w+\((\d+)(?:, (\d+))?\)", text)
    if part is None:
        return WHOLE
    first, second = part.groups()
    return Layout("split", int(first), int(second)) if second else Layout("confined", 0, int(first))


def _fixed(
    on: Machine, program: Program, row: dict[str, Any]
) -> Callable[[StepState, Predictor, Any], tuple[StepPlan, Any]]:
    """The plan of a fixed point: a layout, its finetune part kept busy or not, so many tasklets behind each step."""
    layout, after = layout_of(row["layout"]), int(row["after"])

    def plan(state: StepState, predictor: Predictor, memory: Any) -> tuple[StepPlan, Any]:
        if not state.batch:
            return StepPlan(), memory
        job, count = state.jobs[0], 0
        if layout != WHOLE:
            cell = on.device.cell(layout, state.padded, state.kv_tokens, state.max_kv)
            lacking = (1.0 if after else _AHEAD) * cell.beside_ms - state.beside_ms
            for kind in job.tasklets:
                ms = program.ms[program.kinds.index(kind)] / cell.speed
                if lacking < (ms if after else 0.0):
                    break
                lacking -= ms
                count += 1
        return StepPlan(layout, count, min(after, len(job.tasklets) - count), job.job_id, reason="fixed"), memory

    return plan


def _run(
    on: Machine, program: Program, row: dict[str, Any], policy: BoundPolicy, target_ms: float, seed: int
) -> tuple[list[float], float]:
    """As many steps as the row has, from the same context on."""
    batch, steps = row["batch"], SKIP + row["steps"]
    longest_ms = row["p99_ms"] if target_ms == _NO_TARGET_MS else max(target_ms, row["p99_ms"])
    scenario = Scenario(requests(batch, steps), steps * 1.2 * longest_ms / 1e3, target_ms, jobs=(_JOB,), seed=seed)
    return counted(Simulation(scenario, on.device, policy, on.predictor(), [program]), program, steps)


def requests(batch: int, steps: int) -> list[Arrival]:
    """A point's requests: so many, which outlast so many steps."""
    return endless(Load(batch, batch * PROMPT, PROMPT), steps)


def counted(simulation: Simulation, program: Program, steps: int) -> tuple[list[float], float]:
    """Gaps (ms) of the first `steps` steps of a run, without those in which the batch is still filling, and finetune
    tokens/s in them."""
    done, shown = simulation.run().steps, slice(SKIP, steps)
    gaps = done.gap_ms[shown]
    tasklets = sum(done.beside[shown]) + sum(done.after[shown])
    return gaps, tasklets * program.tokens / len(program) / sum(gaps) * 1e3
