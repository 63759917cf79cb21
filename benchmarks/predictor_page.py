"""The figures of docs/predictor.md, from results/predictor.json."""

from __future__ import annotations

from typing import Any

from benchmarks.page import DOCS, table

PAGE = DOCS / "predictor.md"


def figures(results: dict[str, Any]) -> dict[str, str]:
    """The page's figures by name. All parts of the benchmark must have run."""
    fit, stable, drift = results["fit"], results["stable"], results["drift"]
    bare = stable["without_widening"]
    broken, cost = results["broken"]["rows"], results["cost"]
    look_ups = {row["predictor"]: row["look_up_us"] for row in broken if "look_up_us" in row}
    refits = [row["refit_ms_per_step"] for row in broken if row.get("refit_ms_per_step")]
    return {
        "median_error": _percent(results["median_error"]),
        "p99_error": _percent(results["p99_error"]),
        "miss_rate": _percent(results["miss_rate"]),
        "recovery_steps": f"{results['recovery_steps']}",
        "plan_us": f"{results['plan_us']:g} µs",
        "paper_median": _percent(fit["paper"]["median_error"]),
        "paper_p99": _percent(fit["paper"]["p99_error"]),
        "seeds": table(
            ["seed", "median error", "p99 error", "the paper's formula: median", "p99"],
            [
                [seed, *(_percent(of[key]) for of in (ours, paper) for key in ("median", "p99"))]
                for seed, (ours, paper) in enumerate(
                    zip(fit["two_stage"]["of_seeds"], fit["paper"]["of_seeds"], strict=True)
                )
            ],
        ),
        "worst": table(
            ["error", "worst points"], [[f"{100 * row['error']:+.1f} %", row["at"]] for row in fit["worst"]]
        ),
        "measuring": table(
            ["points measured", "median error elsewhere", "p99 error elsewhere"],
            [
                [row["points"], _percent(row["median_error"]), _percent(row["p99_error"])]
                for row in results["measuring"]["rows"]
            ],
        ),
        "unwidened": _percent(bare["miss_rate"]),
        "unwidened_change": _percent(bare["miss_rate_after_a_change_of_layout"]),
        "steps": f"{stable['steps']:,}",
        "miss_by_10k": ", ".join(_percent(rate) for rate in stable["miss_rate_per_10000"]),
        "miss_beside": _percent(stable["miss_rate_beside"]),
        "miss_first": _percent(stable["miss_rate_first_1000"]),
        "drift_first": _percent(drift["miss_rate_by_50"][0]),
        "drift_later": _percent(drift["miss_rate_200_to_400"]),
        "drift": table(
            ["steps after the drift", "missed", "steps with finetuning"],
            [
                [f"{50 * n}–{50 * (n + 1)}", _percent(missed), f"{100 * trains:.0f} %"]
                for n, (missed, trains) in enumerate(
                    zip(drift["miss_rate_by_50"], drift["steps_with_finetuning_by_50"], strict=True)
                )
            ],
        ),
        "broken": table(
            ["condition", "predictor", "missed", "width", "gaps in target", "finetune tokens/s"],
            [
                [
                    r["condition"], r["predictor"], _percent(r["miss_rate"]), _percent(r["width"]),
                    _percent(r["attainment"]), f"{r['finetune_tokens_s']:,}",
                ]
                for r in broken
                if "condition" in r
            ],
        ),
        "look_up": f"{look_ups['two-stage']:g} µs",
        "look_up_quantile": f"{look_ups['quantile regression']:g} µs",
        "refit": f"{min(refits):.2f} to {max(refits):.2f} ms",
        "cost": table(
            ["policy", "median µs", "p99 µs", "(first call)"],
            [
                [name, f"{row['median_us']:g}", f"{row['p99_us']:g}", f"({row['first_median_us']:g})"]
                for name, row in cost.items()
                if isinstance(row, dict) and "median_us" in row
            ],
        ),
        "load_average": f"{cost['load_average']:g}",
    }  # fmt: skip


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %" if share < 0.1 else f"{100 * share:.1f} %"
