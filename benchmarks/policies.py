"""Every policy over three public traces on two simulated devices; the figures of docs/policies.md.

    python -m benchmarks.policies --traces DIR [--part probe --part table ...] [--scale 1.0] [--out FILE]

DIR holds azure_conv.csv, azure_code.csv (Azure LLM inference trace 2023) and mooncake_conversation_trace.jsonl. Parts:
probe and measured (the simulator against measurement), speed (an hour of azure_conv), table (policies × targets),
headline (Harli's claim on the Ada6000 model), questions (what the paper leaves open). All parts take about half an hour
on one core; --scale 0.1 takes a tenth of the simulated time, for a look.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.page import fill
from benchmarks.policy_bench import FILES, POLICIES, TARGETS, WINDOW_S, Bench, knobs_of, merit, short
from benchmarks.policy_measured import measured
from benchmarks.policy_page import PAGE, figures
from benchmarks.policy_questions import headline, questions
from benchmarks.record import RESULTS, provenance
from core.policy import bind
from core.simulate.command import machine
from core.simulate.engine import Simulation
from core.simulate.probe import probe_rows
from core.simulate.scenario import Scenario
from core.workload.traces import cut

HERE = Path(__file__).parent


def table(bench: Bench, say: Callable[[str], None]) -> dict[str, Any]:
    """Policies × targets × traces × devices; each policy with the best of its settings."""
    rows: list[dict[str, Any]] = []
    for device in WINDOW_S:
        on = machine(device)
        for trace in FILES:
            windows, seconds = bench.windows(trace, device), WINDOW_S[device] * bench.scale
            solo = bench.runs(windows, on, seconds, bind("solo"), 1e9)
            base = solo.itl_p99
            fixed = [
                (knobs, bench.runs(windows, on, seconds, bind("static", **knobs), 1e9))
                for knobs in knobs_of("static", on.device)
            ]
            for x in TARGETS:
                target_ms = x * base
                say(f"{trace} on {device} at {x} x {base:.2f} ms")
                for policy in POLICIES:
                    if policy == "solo":
                        tried = [({}, solo)]
                    elif policy == "static":
                        tried = fixed
                    else:
                        tried = [
                            (knobs, bench.runs(windows, on, seconds, bind(policy, **knobs), target_ms))
                            for knobs in knobs_of(policy, on.device)
                        ]
                    knobs, best = max(tried, key=lambda one: merit(one[1], target_ms))
                    head = {"trace": trace, "device": device, "policy": policy, "target_x": x}
                    rows.append(head | {"knobs": knobs} | best.row(target_ms))
    return {"rows": rows, "verdict": verdict(rows)}


def verdict(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """hybrid against the best other policy that holds the target, cell by cell."""
    cells: dict[tuple[str, str, float], dict[str, dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["trace"], row["device"], row["target_x"]), {})[row["policy"]] = row
    compared, broken = [], []
    for (trace, device, x), of in cells.items():
        where = {"trace": trace, "device": device, "target_x": x}
        if of["solo"]["holds"] and not of["hybrid"]["holds"]:
            broken.append(where | {"attainment": of["hybrid"]["attainment"]})
        rivals = [row for name, row in of.items() if name not in ("hybrid", "solo") and row["holds"]]
        if rivals:
            rival = max(rivals, key=lambda row: row["finetune_tokens_s"])
            ratio = of["hybrid"]["finetune_tokens_s"] / max(rival["finetune_tokens_s"], 1e-9)
            compared.append(where | {"rival": rival["policy"], "ratio": round(ratio, 4)})
    return {
        "cells": len(cells),
        "worst": sorted(compared, key=lambda one: one["ratio"])[:8],
        "below_97_percent": [one for one in compared if one["ratio"] < 0.97],
        "target_not_held_though_solo_does": broken,
        "median_ratio": round(float(np.median([one["ratio"] for one in compared])), 4) if compared else None,
    }


def probe(bench: Bench, say: Callable[[str], None]) -> dict[str, Any]:
    """The simulator against the recorded H200 probe."""
    recorded = json.loads((HERE / "data" / "h200_hybrid_probe.json").read_text())
    rows = sorted(probe_rows(machine("h200").device, recorded), key=lambda row: -row.worst_error)
    say(f"probe: worst of {len(rows)} rows {rows[0].worst_error:.3f}")
    return {
        "rows": len(rows),
        "within_15_percent": sum(row.worst_error <= 0.15 for row in rows),
        "median_error": round(float(np.median([row.worst_error for row in rows])), 4),
        "worst": [
            {
                "batch": row.batch, "decode_sms": row.decode_sms or 132, "target_ms": row.target_ms,
                "p50_ms": row.p50_ms, "simulated_p50_ms": short(row.simulated_p50_ms), "tokens_s": row.tokens_s,
                "simulated_tokens_s": round(row.simulated_tokens_s), "error": round(row.worst_error, 4),
            }
            for row in rows[:5]
        ],
    }  # fmt: skip


def speed(bench: Bench, say: Callable[[str], None]) -> dict[str, Any]:
    """Seconds that an hour of azure_conv takes, per policy."""
    on, answer = machine("h200"), {}
    arrivals = bench.trace("azure_conv")
    length = (arrivals[-1].time_s + 1) * bench.scale
    on.predictor()
    for policy in ("solo", "hybrid"):
        began = time.process_time()
        scenario = Scenario(cut(arrivals, 0, length), length, 14.0)
        outcome = Simulation(scenario, on.device, bind(policy), on.predictor()).run()
        took = time.process_time() - began
        steps = len(outcome.steps.gap_ms)
        answer[policy] = {
            "simulated_s": round(length), "cpu_s": round(took, 1), "steps": steps,
            "us_per_step": round(took / steps * 1e6, 1),
        }  # fmt: skip
        say(f"speed: {policy} {answer[policy]}")
    return answer


def main(arguments: Sequence[str] | None = None) -> None:
    parts: dict[str, Callable[[Bench, Callable[[str], None]], dict[str, Any]]] = {
        "probe": probe, "measured": measured, "speed": speed, "table": table, "headline": headline,
        "questions": questions,
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="folder with the three trace files")
    parser.add_argument("--part", action="append", choices=list(parts), help="may be repeated; all otherwise")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the simulated time")
    parser.add_argument("--out", type=Path, default=RESULTS / "policies.json")
    given = parser.parse_args(arguments)
    bench = Bench(given.traces, given.scale)
    results: dict[str, Any] = json.loads(given.out.read_text()) if given.out.is_file() else {}
    for name in given.part or parts:
        began = time.perf_counter()
        answer = parts[name](bench, lambda text: print(text, file=sys.stderr, flush=True))
        if name == "table":
            results["rows"] = answer.pop("rows")
        results[name] = answer | made(name, given.scale, time.perf_counter() - began)
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(_lines(results | provenance("harli", "numpy")))
    if given.out == RESULTS / "policies.json":
        fill(PAGE, figures(results))
    print(json.dumps(results.get("table", {}), indent=1))


def made(part: str, scale: float, seconds: float) -> dict[str, Any]:
    """Machine, versions, date and command of a figure."""
    return {
        "made": {
            **provenance("harli", "numpy"),
            "command": f"python -m benchmarks.policies --traces DIR --part {part} --scale {scale:g}",
            "scale": scale,
            "seconds": round(seconds),
        }
    }


def _lines(results: dict[str, Any]) -> str:
    """JSON with a line per row, so that changes can be read."""
    rows = results.get("rows", [])
    rest = {name: value for name, value in results.items() if name != "rows"}
    text = json.dumps(rest, indent=1)
    body = ",\n  ".join(json.dumps(row) for row in rows)
    return f'{{\n "rows": [\n  {body}\n ],{text[1:]}\n' if rows else text + "\n"


if __name__ == "__main__":
    main()
