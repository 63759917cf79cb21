"""docs/frontier.md and its plot, from results/frontier*.json, lora_kernels.json and live.json:
``python -m benchmarks.frontier_page``"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.page import DOCS, fill, table
from benchmarks.record import RESULTS
from core.policy import POLICIES

PAGE, PLOT = DOCS / "frontier.md", DOCS / "frontier.svg"
# Finetune tokens/s that a step target should leave room for, as a probe without LoRA serving reached them.
GOALS: dict[int, dict[float, int]] = {
    32: {8: 2200, 9: 3900, 11: 7300, 13: 8800, 16: 9800, 28: 11800, 50: 13400},
    128: {14: 1500, 16: 4300, 20: 7700, 28: 9000, 34: 10300, 50: 11800},
}
FIXED = ("static", "confined", "slices", "static + slices")
AGAIN = "frontier_again"  # another run of all of it, on another card
KERNELS, REPLAY = "lora_kernels", "frontier_replay"
NOTHING = "Not measured yet."


class Cell(NamedTuple):
    """The best that holds a target: finetune tokens/s, p99 of the gaps, and where."""

    tokens_s: int
    p99_ms: float
    where: str


def best(rows: Sequence[dict[str, Any]], batch: int, target_ms: float, names: Sequence[str]) -> Cell | None:
    """Among the fixed points of those names, the one that trains most with its p99 within the target."""
    held = [
        Cell(row["finetune_tokens_s"], row["p99_ms"], _where(row))
        for row in rows
        if row["batch"] == batch and row["policy"] in names and not row["target_ms"] and row["p99_ms"] <= target_ms
    ]  # fmt: skip
    return max(held, default=None)


def _where(row: dict[str, Any]) -> str:
    return f"{row['layout']} +{row['after']}" if row["after"] else str(row["layout"])


def live(rows: Sequence[dict[str, Any]], batch: int, target_ms: float, policy: str) -> Cell | None:
    """What a policy reached that planned for the target; None where it was not run."""
    for row in rows:
        if (row["batch"], row["target_ms"], row["policy"]) == (batch, target_ms, policy):
            return Cell(row["finetune_tokens_s"], row["p99_ms"], row["layout"])
    return None


def policies(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Those that were run at a target, ours first."""
    ran = {row["policy"] for row in rows if row["target_ms"]}
    return sorted(ran, key=lambda name: (name != "hybrid", name != "harli", list(POLICIES).index(name)))


def targets(rows: Sequence[dict[str, Any]], batch: int) -> list[float]:
    """ms: the goals' and those at which a policy was run."""
    return sorted({row["target_ms"] for row in rows if row["batch"] == batch and row["target_ms"]} | set(GOALS[batch]))


def figures(results: dict[str, Any], served: dict[str, Any], others: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The page's figures by name. served: results/live.json; others: further results of the frontier by name."""
    rows = results["rows"]
    batches = [batch for batch in GOALS if any(row["batch"] == batch for row in rows)]
    others = dict(others)
    again = others.pop(AGAIN, None)
    return {
        "made": _made(results),
        **{f"goal_{batch}": _goals(rows, batch) if batch in batches else NOTHING for batch in GOALS},
        "reached": "; ".join(_reached(rows, batch) for batch in batches) + ".",
        "alone": _alone(rows),
        "layouts": _layouts(rows),
        "host": _host(rows),
        "exclusive": f"{results['setup']['exclusive_tokens_s']:,}",
        "tokens": _tokens(results["same_tokens"]),
        "again": _again(again) if again is not None else NOTHING,
        "more": "\n\n".join(_other(name, found) for name, found in others.items()) or NOTHING,
        "no_job": _no_job(served["no_job"]) if "no_job" in served else NOTHING,
        "served": _served(served) or NOTHING,
    }


def replayed(found: dict[str, Any]) -> dict[str, str]:
    """What policies get on the steps of recorded runs: results/frontier_replay.json."""
    by_run: dict[str, list[dict[str, Any]]] = {}
    for row in found["rows"]:
        by_run.setdefault(row["run"], []).append(row)
    return {
        "replay": "\n\n".join(_replay(run, rows) for run, rows in by_run.items()),
        "replay_made": f"`{found['command']}`, {found['date']}",
    }


def _replay(run: str, rows: Sequence[dict[str, Any]]) -> str:
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        margin = f", margin {row['margin']:.0%}" if row["margin"] else ""
        by_name.setdefault(row["policy"] + margin, []).append(row)
    ran, lines = list(by_name), []
    for batch, target in sorted({(row["batch"], row["target_ms"]) for row in rows}):
        of = {
            name: next(row for row in found if (row["batch"], row["target_ms"]) == (batch, target))
            for name, found in by_name.items()
        }
        goal, fixed = of[ran[0]]["goal"], of[ran[0]]["best_fixed_tokens_s"]
        cells = [_in_seeds(of[name]) for name in ran]
        lines.append([batch, f"{target:g}", f"{goal:,}" if goal else "", *cells, f"{fixed:,}" if fixed else "none"])
    told = ", ".join(f"{name} {sum(row['held'] for row in found):,}" for name, found in by_name.items())
    runs = sum(row["seeds"] for row in by_name[ran[0]])
    rate = table(["batch", "target ms", "goal", *ran, "best fixed point, on the GPU"], lines)
    return f"`{run}`, all targets taken together held by {told} of {runs:,} times:\n\n{rate}"


def _in_seeds(row: dict[str, Any]) -> str:
    text = f"{row['tokens_s']:,}"
    return text if row["held"] == row["seeds"] else f"{text} (held {row['held']} of {row['seeds']})"


def _made(results: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items() if name != "harli")
    return f"{results['gpu']}; {results['machine']}; {versions}; {results['date']}; `{results['command']}`."


def _goals(rows: Sequence[dict[str, Any]], batch: int) -> str:
    ran = policies(rows)
    lines = []
    for target in targets(rows, batch):
        fixed = best(rows, batch, target, FIXED)
        goal = GOALS[batch].get(target)
        lines.append(
            [f"{target:g}", f"{goal:,}" if goal else "", *(_cell(live(rows, batch, target, p), target) for p in ran),
             f"{fixed.tokens_s:,} ({fixed.where})" if fixed else "none"]
        )  # fmt: skip
    return table(["target ms", "goal", *ran, "best fixed point"], lines)


def _again(results: dict[str, Any]) -> str:
    """The same measured another time: what each batch's targets got."""
    rows = results["rows"]
    tables = [f"**Batch {batch}**\n\n{_goals(rows, batch)}" for batch in GOALS]
    reached = "; ".join(_reached(rows, batch) for batch in GOALS)
    return "\n\n".join([_made(results), *tables, f"Finetuning alone: {results['setup']['exclusive_tokens_s']:,} "
                        f"tokens/s; against the goals, {reached}."])  # fmt: skip


def _cell(found: Cell | None, target: float) -> str:
    if found is None:
        return "–"
    text = f"{found.tokens_s:,}"
    return text if found.p99_ms <= target else f"~~{text}~~ p99 {found.p99_ms:.1f}"


def _reached(rows: Sequence[dict[str, Any]], batch: int) -> str:
    goals = GOALS[batch]

    def met(cells: dict[float, Cell | None]) -> list[float]:
        return [t for t, cell in cells.items() if cell and cell.p99_ms <= t and cell.tokens_s >= goals[t]]

    fixed = met({target: best(rows, batch, target, FIXED) for target in goals})
    planned = {name: met({target: live(rows, batch, target, name) for target in goals}) for name in policies(rows)}
    told = [f"`{name}` {len(at)} (at {', '.join(f'{t:g}' for t in at)} ms)" for name, at in planned.items() if at]
    reached = f"batch {batch}: the best fixed point reaches {len(fixed)} of {len(goals)} goals"
    return f"{reached}, {', '.join(told) or 'no policy any'}"


def _alone(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        [row["batch"], row["policy"], f"{row['p50_ms']:.2f}", f"{row['p99_ms']:.2f}", row["steps"]]
        for row in rows
        if row["policy"] == "plain" or (row["policy"] == "solo" and row["layout"] == "whole")
    ]
    return table(["batch", "", "p50 ms", "p99 ms", "gaps"], lines)


def _layouts(rows: Sequence[dict[str, Any]]) -> str:
    return _points([row for row in rows if row["policy"] in FIXED])


def _points(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        [
            row["batch"], _point(row), f"{row['p50_ms']:.1f}", f"{row['p99_ms']:.1f}", f"{row['finetune_tokens_s']:,}",
            row["host_us_p50"] or "",
        ]
        for row in rows
    ]  # fmt: skip
    return table(["batch", "layout", "p50 ms", "p99 ms", "finetune tokens/s", "µs of the scheduler's thread"], lines)


def _point(row: dict[str, Any]) -> str:
    if row["target_ms"]:
        return f"{row['policy']} @ {row['target_ms']:g} ms"
    return {"plain": "SGLang alone", "solo": f"{row['layout']}, no job"}.get(row["policy"], _where(row))


def _host(rows: Sequence[dict[str, Any]]) -> str:
    """The scheduler thread's share of a step, of the rows in which something is trained."""
    shares = sorted(row["host_us_p50"] / row["p50_ms"] / 10 for row in rows if row["finetune_tokens_s"])
    middle, over = shares[len(shares) // 2], sum(share > 2.0 for share in shares)
    text = f"{middle:.1f} % of the step at the median of {len(shares)} points, at most {shares[-1]:.1f} %"
    return text + (f" (over 2 % at {over})" if over else "")


def _tokens(same: dict[str, str]) -> str:
    differing = {point: text for point, text in same.items() if text.split()[0] != text.split()[2]}
    if not differing:
        return f"At all {len(same)} points every request got the tokens that plain SGLang gave it."
    listed = "; ".join(f"{point}: {text}" for point, text in differing.items())
    alike = len(same) - len(differing)
    return f"At {alike} of {len(same)} points every request got plain SGLang's tokens; not at {listed}."


def _other(name: str, results: dict[str, Any]) -> str:
    rows = results["rows"]
    shown = [row for row in rows if row["target_ms"] or row["policy"] in ("plain", "solo", *FIXED)]
    return "\n\n".join(
        [
            f"`{name}`: {rows[0]['model']}. {_made(results)}",
            _points(shown),
            f"Finetuning alone: {results['setup']['exclusive_tokens_s']:,} tokens/s. The scheduler's thread: "
            f"{_host(rows)}. {_tokens(results['same_tokens'])}",
        ]
    )


def _no_job(found: dict[str, Any]) -> str:
    lines = []
    for row in found["rows"]:
        for name, engine in (("plain", "SGLang alone"), ("harli", "this engine, no job")):
            of = row[name]
            low, high = of["p99_interval"]
            lines.append([row["batch"], engine, f"{of['steps']:,}", f"{of['p50_ms']:.2f}",
                          f"{of['p99_ms']:.2f} ({low:.2f}–{high:.2f})"])  # fmt: skip
    return table(["batch", "", "gaps", "p50 ms", "p99 ms (95 %)"], lines)


def _served(served: dict[str, Any]) -> str:
    """A line for each part of the benchmark of the engine as it serves."""
    lines = []
    for row in served.get("replay", {}).get("rows", ()):
        name = f"{served['replay']['trace']} × {row['speed']:g}, {'with' if row['job'] else 'without'} a job"
        lines.append([name, *_replayed(row)])
    if "soak" in served:
        of = served["soak"]
        for row in of["rows"]:
            name = f"{of['trace']} × {row['speed']:g}, beside one job for {of['seconds'] / 60:.0f} minutes"
            lines.append([name, *_replayed(row)])
    for row in served.get("checkpoints", {}).get("rows", ()):
        name = f"batch {served['checkpoints']['batch']}, {row['checkpoints'] or 'no'} checkpoints"
        lines.append([name, f"{served['checkpoints']['target_ms']:g}", f"{row['p50_ms']:.1f} / {row['p99_ms']:.1f}",
                      f"{100 * row['missed']:.2f} %", "", f"{row['finetune_tokens_s']:,}", ""])  # fmt: skip
    for row in served.get("decode_only", {}).get("rows", ()):
        name = f"batch {served['decode_only']['batch']}, decode only, {'with' if row['job'] else 'without'} a job"
        target, trained = row.get("target_ms"), row.get("finetune_tokens_s")
        lines.append([name, f"{target:g}" if target else "", f"{row['p50_ms']:.1f} / {row['p99_ms']:.1f}", "", "",
                      f"{trained:,}" if trained is not None else "", ""])  # fmt: skip
    if "tokens" in served:
        of = served["tokens"]
        name = (
            f"{of['prompts']} prompts: answers that differ from those without a job: {of['differ_fixed']} in fixed "
            f"batches, {of['differ_live']} in live ones ({of['differ_live_without_job']} between two runs without one)"
        )
        lines.append([name, *[""] * 6])
    if not lines:
        return ""
    columns = ["target ms", "gap p50 / p99 ms", "over the target", "TTFT / TPOT p99 ms", "finetune tokens/s", "failed"]
    return table(["", *columns], lines)


def _replayed(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['target_ms']:g}", f"{row['p50_ms']:.1f} / {row['p99_ms']:.1f}", f"{100 * row['missed']:.2f} %",
        f"{row['ttft_p99_ms']:,.0f} / {row['tpot_p99_ms']:.1f}", f"{row['finetune_tokens_s']:,}",
        f"{row['failed']} of {row['requests']}",
    ]  # fmt: skip


# ---- plot ------------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, TOP = 420, 300, 62, 34
NAMES_END = 24  # between the last line's name and the axis
COLOURS = ("#0b6bcb", "#c2410c", "#4d7c0f", "#7c3aed", "#0f766e", "#a16207", "#be185d")


def plot(rows: Sequence[dict[str, Any]]) -> str:
    """Finetune tokens/s against the target, a panel each batch, as an SVG picture."""
    panels = "".join(_panel(rows, batch, 20 + number * (WIDTH + LEFT + 20)) for number, batch in enumerate(GOALS))
    width, height = 2 * (WIDTH + LEFT) + 60, HEIGHT + TOP + 60
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="{width}" height="{height}" fill="white"/>{panels}</svg>\n'
    )


def _panel(rows: Sequence[dict[str, Any]], batch: int, x0: float) -> str:
    at = targets(rows, batch)
    lines: dict[str, list[tuple[float, float]]] = {
        "goal": [(t, goal) for t, goal in GOALS[batch].items()],
        "best fixed point": [(t, found.tokens_s) for t in at if (found := best(rows, batch, t, FIXED))],
    }
    for policy in policies(rows):
        held = [(t, cell) for t in at if (cell := live(rows, batch, t, policy)) and cell.p99_ms <= t]
        if held:
            lines[f"{policy}, live"] = [(t, cell.tokens_s) for t, cell in held]
    most = 2000 * -(-max([16000, *(y for points in lines.values() for _, y in points)]) // 2000)
    last = max(at)

    def place(target: float, tokens: float) -> tuple[float, float]:
        return x0 + LEFT + WIDTH * target / last, TOP + HEIGHT * (1 - tokens / most)

    parts = [f'<text x="{x0 + LEFT}" y="20" font-weight="bold">batch {batch}</text>']
    for tokens in range(0, int(most) + 1, 4000):
        (left, y), (right, _) = place(0, tokens), place(last, tokens)
        parts.append(f'<line x1="{left:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{tokens:,}</text>')
    for target in range(0, int(last) + 1, 10):
        x, y = place(target, 0)
        parts.append(f'<text x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle">{target}</text>')
    x, y = place(last / 2, 0)
    parts.append(f'<text x="{x:.1f}" y="{y + 34:.1f}" text-anchor="middle">p99 target, ms (finetune tokens/s)</text>')
    colours = dict(zip(("best fixed point", *(f"{policy}, live" for policy in policies(rows))), COLOURS, strict=False))
    for number, (name, points) in enumerate(lines.items()):
        colour = colours.get(name, "#888")
        dash = ' stroke-dasharray="5 4"' if name == "goal" else ""
        path = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        parts += ['<circle cx="{:.1f}" cy="{:.1f}" r="3" fill="{}"/>'.format(*place(*p), colour) for p in points]
        y = TOP + HEIGHT - NAMES_END - 16 * (len(lines) - 1 - number)
        parts.append(f'<text x="{x0 + LEFT + WIDTH - 150}" y="{y}" fill="{colour}">{name}</text>')
    return "".join(parts)


def recorded(name: str = "frontier") -> dict[str, Any]:
    """``results/<name>.json``."""
    results: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return results


def read() -> tuple[dict[str, Any], dict[str, Any], dict[str, dict[str, Any]]]:
    """What `figures` needs, as far as it has been measured."""
    served = RESULTS / "live.json"
    others = {
        path.stem: json.loads(path.read_text())
        for path in sorted(RESULTS.glob("frontier_*.json"))
        if not path.stem.endswith(("_profile", "_replay"))
    }
    return recorded(), json.loads(served.read_text()) if served.is_file() else {}, others


_KERNELS = {
    "product": "the layers' own products", "sglang": "SGLang's csgmv", "bounded": "its grid bounded by the batch",
    "tuned": "and its blocks tuned", "behind": "ours, behind the product", "beside": "and the first beside it",
    "dense": "cuBLAS, one adapter only",
}  # fmt: skip


def kernels(measured: dict[str, Any]) -> dict[str, str]:
    """What an adapter adds to a step, by the kernels that serve it."""
    steps: dict[str, dict[str, float]] = measured["ms_per_step"]
    rows = [[what, *(f"{of[name]:.2f}" for of in steps.values())] for name, what in _KERNELS.items()]
    return {"kernels": table(["ms a step", *(f"batch {batch}" for batch in steps)], rows)}


def main() -> None:
    """Write the figures into the page, and the plot."""
    results, served, others = read()
    fill(PAGE, figures(results, served, others) | kernels(recorded(KERNELS)) | replayed(recorded(REPLAY)))
    PLOT.write_text(plot(results["rows"]))


if __name__ == "__main__":
    main()
