"""Part of benchmarks/policies.py: cells that were measured on an H200 with SGLang, run again in the simulator."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.frontier import PROMPT, SKIP
from benchmarks.policy_bench import SEEDS, Bench, short
from benchmarks.record import RESULTS
from core.policy import POLICIES, bind
from core.simulate.command import Load, Machine, endless, machine
from core.simulate.device import HEAD_PARTS, Program
from core.simulate.engine import Simulation
from core.simulate.scenario import Scenario


def measured(bench: Bench, say: Callable[[str], None]) -> dict[str, Any]:
    """The policies' rows of frontier.json in which something was trained, there or here. The simulated device and its
    predictor are made of the profile that the same run took (frontier_profile.json)."""
    on, rows = machine(str(RESULTS / "frontier_profile.json")), []
    for row in json.loads((RESULTS / "frontier.json").read_text())["rows"]:
        if row["policy"] not in POLICIES or not row["target_ms"]:
            continue
        gaps, tokens = zip(*[_run(on, row, seed) for seed in SEEDS], strict=True)
        found = {
            "batch": row["batch"], "target_ms": row["target_ms"], "policy": row["policy"],
            "p50_ms": row["p50_ms"], "simulated_p50_ms": short(float(np.quantile(gaps, 0.5))),
            "p99_ms": row["p99_ms"], "simulated_p99_ms": short(float(np.quantile(gaps, 0.99))),
            "tokens_s": row["finetune_tokens_s"], "simulated_tokens_s": round(float(np.mean(tokens))),
        }  # fmt: skip
        if found["tokens_s"] or found["simulated_tokens_s"]:
            rows.append(found)
            say(f"measured: {found}")
    p50 = np.array([row["simulated_p50_ms"] / row["p50_ms"] - 1 for row in rows])
    trained = np.array([row["simulated_tokens_s"] / max(row["tokens_s"], 1) - 1 for row in rows])
    return {
        "rows": rows,
        "p50_error_median": round(float(np.median(np.abs(p50))), 4),
        "tokens_error_median": round(float(np.median(np.abs(trained))), 4),
        "within_15_percent": int(((np.abs(p50) <= 0.15) & (np.abs(trained) <= 0.15)).sum()),
    }


def _run(on: Machine, row: dict[str, Any], seed: int) -> tuple[list[float], float]:
    """Gaps of the steps that count, and finetune tokens/s in them: as many steps from the same context on."""
    batch, steps = row["batch"], SKIP + row["steps"]
    requests = endless(Load(batch, batch * PROMPT, PROMPT), steps)
    scenario = Scenario(requests, steps * 1.2 * max(row["target_ms"], row["p99_ms"]) / 1e3, row["target_ms"], seed=seed)
    program = Program(on.device, head_parts=HEAD_PARTS)
    done = Simulation(scenario, on.device, bind(row["policy"]), on.predictor(), [program]).run().steps
    counted = slice(SKIP, steps)
    gaps = done.gap_ms[counted]
    tasklets = sum(done.beside[counted]) + sum(done.after[counted])
    return gaps, tasklets * program.tokens / len(program) / sum(gaps) * 1e3
