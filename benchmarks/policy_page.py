"""The tables of docs/policies.md, written into the page between their marks from results/policies.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.page import DOCS, table
from benchmarks.policy_bench import POLICIES, WINDOW_S

PAGE = DOCS / "policies.md"


def figures(results: dict[str, Any]) -> dict[str, str]:
    """The page's tables by name, as far as there are results for them."""
    return {name: make(results) for name, (part, make) in TABLES.items() if part in results}


def _policies(results: dict[str, Any]) -> str:
    cells: dict[tuple[str, str, float], dict[str, dict[str, Any]]] = {}
    for row in results["rows"]:
        cells.setdefault((row["device"], row["trace"], row["target_x"]), {})[row["policy"]] = row
    shown = POLICIES[1:]
    rows: list[list[object]] = []
    for (device, trace, x), of in cells.items():
        ours = of["hybrid"]
        best = max((r["finetune_tokens_s"] for name, r in of.items() if name != "hybrid" and r["holds"]), default=0.0)
        ratio = f"{ours['finetune_tokens_s'] / best:.2f}" if best else "–"
        target = f"{x:g} × = {ours['target_ms']:g}"
        rows.append([f"{trace}, {device}", target, *(_tokens(of[name]) for name in shown), ratio])
    return table(["trace, device", "target ms", *shown, "hybrid ÷ best other"], rows)


def _tokens(row: dict[str, Any]) -> str:
    text = f"{row['finetune_tokens_s']:,.0f}"
    if row["policy"] == "hybrid":
        text += f" ({min(row['tokens_s_of_seeds']):,}–{max(row['tokens_s_of_seeds']):,})"
    return text if row["holds"] else f"~~{text}~~ {100 * row['attainment']:.1f} %"


def _verdict(results: dict[str, Any]) -> str:
    found = results["table"]["verdict"]
    cells, below, broken = found["cells"], found["below_97_percent"], found["target_not_held_though_solo_does"]
    text = f"In {cells - len(below)} of {cells} cells `hybrid` trains at least 97 % of what any other policy that "
    text += f"holds the target trains; it is {found['worst'][0]['ratio']:.2f} times the best of them at the least, "
    text += f"{found['median_ratio']:.2f} times at the median. "
    if below:
        listed = ", ".join(f"{_cell_name(one)} ({100 * one['ratio']:.0f} % of {one['rival']})" for one in below)
        text += f"It is short in: {listed}. "
    if broken:
        listed = ", ".join(f"{_cell_name(one)} ({100 * one['attainment']:.2f} %)" for one in broken)
        return text + f"Solo holds the target and `hybrid` does not in: {listed}."
    return text + "It holds the target everywhere that solo does."


def _cell_name(one: dict[str, Any]) -> str:
    return f"{one['trace']} on {one['device']} at {one['target_x']:g} ×"


def _windows(part: str) -> Callable[[dict[str, Any]], str]:
    def make(results: dict[str, Any]) -> str:
        scale = results[part]["made"]["scale"]
        return f"H200 {WINDOW_S['h200'] * scale:g} s, Ada6000 {WINDOW_S['ada6000'] * scale:g} s"

    return make


def _speed(results: dict[str, Any]) -> str:
    parts = [
        f"{found['simulated_s'] / 60:.0f} minutes of azure_conv take {found['cpu_s']:g} s of one core with `{policy}`"
        for policy, found in results["speed"].items()
        if isinstance(found, dict) and "cpu_s" in found
    ]
    return " and ".join(parts)


def _latencies(results: dict[str, Any]) -> str:
    rows = [
        [f"{r['trace']}, {r['device']}", f"{r['target_x']:g} × = {r['target_ms']:g}",
         f"{r['itl_p50_ms']:g} / {r['itl_p99_ms']:g}", f"{r['tpot_p50_ms']:g} / {r['tpot_p99_ms']:g}",
         f"{r['wait_p99_ms']:g}", f"{100 * r['attainment']:.2f} %", f"{100 * r['steps_over']:.2f} %",
         f"{100 * r['miss_rate']:.2f} %", f"{100 * r['exclusive_share']:.0f} %"]
        for r in results["rows"] if r["policy"] == "hybrid"
    ]  # fmt: skip
    head = ["trace, device", "target ms", "ITL p50 / p99", "TPOT p50 / p99", "wait p99", "attained", "steps over",
            "bound missed", "of exclusive"]  # fmt: skip
    return table(head, rows)


def _probe(results: dict[str, Any]) -> str:
    rows = [
        [r["batch"], r["decode_sms"], f"{r['target_ms']:g}", f"{r['p50_ms']:g}", f"{r['simulated_p50_ms']:g}",
         f"{r['tokens_s']:,.0f}", f"{r['simulated_tokens_s']:,}", f"{100 * r['error']:.1f} %"]
        for r in results["probe"]["worst"]
    ]  # fmt: skip
    head = ["batch", "decode SMs", "target ms", "p50 ms", "simulated", "tokens/s", "simulated", "error"]
    return table(head, rows)


_H200 = ["gap p50 / p99, H200", "simulated", "tokens/s, H200", "simulated"]


def _measured(results: dict[str, Any]) -> str:
    rows = [[r["batch"], f"{r['target_ms']:g}", r["policy"], *_both(r)] for r in results["measured"]["rows"]]
    return table(["batch", "target ms", "policy", *_H200], rows)


def _fixed(results: dict[str, Any]) -> str:
    rows = [[r["batch"], r["layout"], r["after"], *_both(r)] for r in results["measured"]["fixed"]["worst"]]
    return table(["batch", "layout", "tasklets behind", *_H200], rows)


def _both(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['p50_ms']:.1f} / {row['p99_ms']:.1f}", f"{row['simulated_p50_ms']:.1f} / {row['simulated_p99_ms']:.1f}",
        f"{row['tokens_s']:,}", f"{row['simulated_tokens_s']:,}",
    ]  # fmt: skip


def _measured_errors(results: dict[str, Any]) -> str:
    found = results["measured"]
    return f"Over these {len(found['rows'])} cells {_off_by(found)}."


def _fixed_errors(results: dict[str, Any]) -> str:
    found = results["measured"]["fixed"]
    return f"Of {found['points']} such points {found['within_15_percent']} are within 15 % in both; {_off_by(found)}."


def _off_by(found: dict[str, Any]) -> str:
    return (
        f"the simulated finetune throughput is off by {100 * found['tokens_error_median']:.1f} % at the median, the "
        f"median gap by {100 * found['p50_error_median']:.1f} %"
    )


def _behind(results: dict[str, Any]) -> str:
    found = results["measured"]["behind"]
    return f"{found['kept_ms']:g} ms or more for each tasklet, which then took {found['took_ms']:g}"


def _headline(results: dict[str, Any]) -> str:
    def gain(of: dict[str, float]) -> str:
        return f"{100 * of['average']:+.0f} % ({100 * of['least']:+.0f} … {100 * of['best']:+.0f})"

    rows = [
        [c["finetune_speed"], gain(c["over_two_gpus"]), gain(c["hybrid_over_two_gpus"]), gain(c["over_static"])]
        for c in results["headline"]["curves"]
    ]
    return table(["assumed finetune speed", "harli over two GPUs", "hybrid over two GPUs", "harli over static"], rows)


def _question(name: str) -> Callable[[dict[str, Any]], str]:
    def make(results: dict[str, Any]) -> str:
        found: list[dict[str, Any]] = results["questions"][name]
        flat = [{k: v for k, v in row.items() if not isinstance(v, dict)} | _spread(row) for row in found]
        head = [key.replace("_", " ") for key in flat[0]]
        return table(head, [[_cell(value) for value in row.values()] for row in flat])

    return make


def _spread(row: dict[str, Any]) -> dict[str, Any]:
    return {name: inner for value in row.values() if isinstance(value, dict) for name, inner in value.items()}


def _cell(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(f"{item:,}" for item in value)
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


QUESTIONS = (
    "batch_sizes", "bursts", "variable_micro_batches", "cost_of_the_margin", "jobs", "adapter_access", "lora_rank",
    "granularity", "prefill_here",
)  # fmt: skip
TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "policies": ("rows", _policies),
    "verdict": ("table", _verdict),
    "windows": ("table", _windows("table")),
    "headline_windows": ("headline", _windows("headline")),
    "questions_windows": ("questions", _windows("questions")),
    "speed": ("speed", _speed),
    "latencies": ("rows", _latencies),
    "probe": ("probe", _probe),
    "measured": ("measured", _measured),
    "measured_errors": ("measured", _measured_errors),
    "fixed": ("measured", _fixed),
    "fixed_errors": ("measured", _fixed_errors),
    "behind": ("measured", _behind),
    "headline": ("headline", _headline),
    **{name: ("questions", _question(name)) for name in QUESTIONS},
}
