r"""Make the device profiles that ship with Harli from measurements.

    python -m core.simulate.fit h200 --grid profile_h200.json --probe hybrid_probe.json \
        --slices tasklet_probe.json --fused fused_probe.json --log sgl_tasklet_probe.log OUT
    python -m core.simulate.fit ada6000 --coefficients harli_ada6000_coefficients.csv --like h200.json OUT
    python -m core.simulate.fit a100 --like h200.json OUT

The grid holds decode steps (batch × context × layout, alone and beside finetuning), the probe the tasklets' durations
and steps with tasklets behind them, slices a few of the grid's cells once more, fused the backward of micro-batches of
64 to 2,048 tokens, the log p50, p90 and p99 of SGLang's steps. A cell that was measured in several runs enters with its
mean.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from collections.abc import Callable
from itertools import accumulate, combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.simulate.device import PAGE_BYTES
from core.simulate.profile import DeviceProfile, LayoutProfile, Surface, TaskletProfile, read_profile

Array = NDArray[np.float64]
_GIB = 1 << 30
_CAPTURED = (1, 2, 4, 8, 12, *range(16, 257, 8))
_KV_BYTES = 32 * 2 * 8 * 128 * 2  # Llama-3-8B: layers, K and V, heads, width, bytes of bf16
_WEIGHT_BYTES = 8_030_261_248 * 2
_LORA_STATE_BYTES = 41_943_040 * 16  # rank 16 on all linears; fp32 master, two moments, gradient
_ACTIVATION_BYTES = int(13.6 * _GIB)  # measured for a micro-batch of 2,048 tokens, one captured program
_GRID_SECONDS, _GRID_ALONE_SECONDS, _SLICES_SECONDS = 0.5, 0.6, 2.0  # how long finetuning ran in each measurement
_LONGEST = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0, 20.0)
_ATTENTION_FLOP = 4 * 4096 * 32  # per prompt token and token before it


def surface(batch: Array, context: Array, ms: Array, longest: float = 0.0) -> Surface:
    """Non-negative plane over (1, batch, KV tokens), relative errors weighted by their first power so that a few odd
    points do not tilt it, and what each measured point is of it."""
    plane, computed, _ = _plane(batch, context, ms, longest)
    return Surface(
        base=_short(plane[0]),
        per_request=_short(plane[1]),
        per_kv_token=_short(plane[2]),
        points=_points(batch, context, ms / computed),
    )


def longest_of(batch: Array, context: Array, ms: Array) -> float:
    """How many requests decode's attention works on at once: the number with which a plane fits best (0: it splits
    requests, so that only KV tokens count)."""
    return min(_LONGEST, key=lambda longest: _plane(batch, context, ms, longest)[2])


def _plane(batch: Array, context: Array, ms: Array, longest: float) -> tuple[Array, Array, float]:
    """Coefficients, computed ms, and the sum of absolute relative errors."""
    kv = context * np.maximum(batch, longest)
    columns = np.stack([np.ones_like(batch), batch, kv], axis=1) / ms[:, None]
    weights = np.ones_like(ms)
    for _ in range(50):
        plane = _non_negative(columns * weights[:, None], weights)
        weights = 1 / np.sqrt(np.maximum(np.abs(columns @ plane - 1), 0.01))
    relative = columns @ plane
    return plane, relative * ms, float(np.abs(relative - 1).sum())


def h200(
    grid: list[dict[str, Any]], probe: dict[str, Any], slices: dict[str, Any], fused: dict[str, Any], log: str
) -> DeviceProfile:
    """NVIDIA H200 from the recorded grid, probe, slices, fused and log."""
    backward = {float(tokens): float(ms) for tokens, ms in fused["bwd"].items()}
    measured = [*grid, *_again(probe, slices)]
    durations: list[float] = probe["dur"]
    size = len(durations)
    layers = (size - 4) // 2
    tasklets = TaskletProfile(
        tokens=2048,
        forward_ms=(round(durations[0] + durations[1], 3), *durations[2 : layers + 1]),
        head_ms=tuple(durations[layers + 1 : layers + 3]),
        backward_ms=tuple(durations[layers + 3 : -1]),
        optimizer_ms=durations[-1],
        shorter=tuple((n, _short(ms / backward[2048])) for n, ms in sorted(backward.items()) if n < 2048),
        activation_pages=-(-_ACTIVATION_BYTES // PAGE_BYTES),
        state_pages=-(-_LORA_STATE_BYTES // PAGE_BYTES),
    )
    sums = [0.0, *accumulate(durations * 100)]

    def speed(tokens_per_s: float, seconds: float) -> float:
        """Work per time of a run that began at the first tasklet and counted tasklets, not their work."""
        count = tokens_per_s * seconds / tasklets.tokens * size
        at = int(count)
        return (sums[at] + (count - at) * durations[at % size]) / (1e3 * seconds)

    def rows(layout: str, finetune_sms: int, beside: bool) -> list[dict[str, Any]]:
        of_layout = [r for r in measured if (r["layout"], r["ft"], bool(r["beside"])) == (layout, finetune_sms, beside)]
        return _merged(of_layout, speed)

    whole = rows("whole", 0, False)
    all_sms = longest_of(*_columns(whole))
    alone_ms, alone_tail = surface(*_columns(whole), all_sms), _level(whole, "tail")
    layouts = [
        LayoutProfile(
            kind="whole", decode_sms=0, finetune_sms=0, alone_ms=alone_ms, alone_tail=alone_tail,
            longest=all_sms, alone_speed=_short(probe["ft_full"] / tasklets.tokens * sum(durations) / 1e3),
        )
    ]  # fmt: skip
    splits = {r["ft"]: (r["dec"], r["ft_alone"]) for r in grid if r["layout"] == "split" and r["beside"]}
    for part, (decode_sms, alone_tokens_s) in sorted(splits.items()):
        alone, beside, confined = rows("split", part, False), rows("split", part, True), rows("confined", part, True)
        alone_speed = _short(speed(alone_tokens_s, _GRID_ALONE_SECONDS))
        next_to_split, next_to_all = _level(beside, "speed"), _level(confined, "speed")
        layouts.append(
            LayoutProfile(
                kind="split", decode_sms=decode_sms, finetune_sms=part, alone_speed=alone_speed,
                longest=(longest := longest_of(*_columns(alone))),
                alone_ms=surface(*_columns(alone), longest), alone_tail=_level(alone, "tail"),
                beside_ms=surface(*_columns(beside), longest), beside_tail=_level(beside, "tail"), speed=next_to_split,
                sharing=_sharing(probe, decode_sms, durations, next_to_split.base),
            )
        )  # fmt: skip
        layouts.append(
            LayoutProfile(
                kind="confined", decode_sms=0, finetune_sms=part, alone_speed=alone_speed,
                alone_ms=alone_ms, alone_tail=alone_tail, longest=all_sms,
                beside_ms=surface(*_columns(confined), all_sms), beside_tail=_level(confined, "tail"),
                speed=next_to_all,
            )
        )  # fmt: skip
    flops = 790e12
    return DeviceProfile(
        device="NVIDIA H200", model="Llama-3-8B", sms=132, captured=_CAPTURED, kv_bytes_per_token=_KV_BYTES,
        arena_pages=_arena_pages(139), layouts=tuple(layouts), tasklets=tasklets, noise=_noise(log),
        prefill_ms_per_token=_short(sum(tasklets.forward_ms) / tasklets.tokens),
        prefill_ms_per_token_and_context=_short(_ATTENTION_FLOP / (0.5 * flops) * 1e3),
        provenance={
            "decode": f"{len(grid)} measured points of a CUDA-graph decode of its own (not SGLang's), torch "
            f"{probe['torch']}, driver {probe['drv']}; between points ratios to a non-negative plane are interpolated",
            "longest": "the number with which the plane over batch and KV tokens fits best",
            "beside": "a mix of forward, head and backward tasklets; speeds are the tasklets' own work ÷ time",
            "tail": "p99 of 20 to 80 steps a point",
            "noise": "p50, p90, p99 of SGLang's own steps, 20 conditions; below p10 and above p99 straight on",
            "tasklets": "CUDA-graph tasklets of LoRA rank 16 on all linears, 4 × 512 tokens, on the whole device",
            "shorter": "backward of 32 layers over 64 to 2,048 tokens",
            "sharing": "steps of batch 32 at targets of 40 and 50 ms",
            "prefill": "the forward tasklets' speed; attention from its operations at half of 790 TFLOP/s",
            "memory": "0.9 × 139 GiB less weights and 2 GiB; activations measured, LoRA state computed",
        },
    )  # fmt: skip


def ada6000(coefficients: list[dict[str, str]], like: DeviceProfile) -> DeviceProfile:
    """RTX 6000 Ada from decode coefficients measured by others; finetuning, noise and spread are assumed.

    Assumed: finetuning on the whole device at 64 % of 0.8 × 364 TFLOP/s (the shares that the H200 reached of its
    measured and its nominal rate); on a part in proportion to its SMs; next to decode as slowed as on the H200.
    """
    flops = 0.8 * 364e12
    slower = 790e12 / flops
    splits = [part for part in like.layouts if part.kind == "split" and part.speed]
    speeds = {part.finetune_sms / like.sms: part.speed.base / part.alone_speed for part in splits if part.speed}
    tails = {p.kind: p for p in like.layouts if p.kind == "whole" or (p.kind == "split" and p.finetune_sms == 68)}
    alone_tail = Surface(base=_typical(tails["whole"].alone_tail))
    beside_tail = Surface(base=_typical(tails["split"].beside_tail or alone_tail))
    sms = max(int(row["decode_sm"]) for row in coefficients)
    layouts = []
    for row in sorted(coefficients, key=lambda r: -int(r["decode_sm"])):
        decode = int(row["decode_sm"])
        part = sms - decode
        base, per_request, per_kv = float(row["c0"]), float(row["b0"]), float(row["k0"])
        alone_ms = Surface(base=base, per_request=per_request, per_kv_token=per_kv)
        if part == 0:
            layouts.append(
                LayoutProfile(
                    kind="whole", decode_sms=0, finetune_sms=0, alone_ms=alone_ms, alone_tail=alone_tail,
                    alone_speed=1.0,
                )
            )  # fmt: skip
            continue
        slowed = 1 + float(row["k2"]) * part
        beside_ms = Surface(
            base=_short(base * slowed), per_request=_short(per_request * slowed), per_kv_token=_short(per_kv * slowed)
        )
        share = part / sms
        kept = float(np.interp(share, sorted(speeds), [speeds[s] for s in sorted(speeds)]))
        layouts.append(
            LayoutProfile(
                kind="split", decode_sms=decode, finetune_sms=part, alone_speed=_short(share), alone_ms=alone_ms,
                alone_tail=alone_tail, beside_ms=beside_ms, beside_tail=beside_tail,
                speed=Surface(base=_short(share * kept)),
            )
        )  # fmt: skip
    return DeviceProfile(
        device="NVIDIA RTX 6000 Ada", model="Llama-3-8B", sms=sms, captured=_CAPTURED, kv_bytes_per_token=_KV_BYTES,
        arena_pages=_arena_pages(48), layouts=tuple(layouts), tasklets=_slower(like.tasklets, slower), noise=like.noise,
        prefill_ms_per_token=_short(like.prefill_ms_per_token * slower),
        prefill_ms_per_token_and_context=_short(like.prefill_ms_per_token_and_context * slower),
        provenance={
            "decode": "coefficients measured by others on an Ada6000 with Llama-3-8B, taken from a public repository",
            "tasklets": f"assumed: the H200's × {slower:.2f} (790 TFLOP/s ÷ 0.8 × 364)",
            "speed": "assumed: in proportion to the SMs; next to decode times the H200's slow-down at that share",
            "tail, noise": "assumed: the H200's",
            "memory": "0.9 × 48 GiB less weights and 2 GiB",
        },
    )  # fmt: skip


def a100(like: DeviceProfile) -> DeviceProfile:
    """A100 80GB by roofline from the H200: what reads memory by bandwidth (4.8 ÷ 2.04 TB/s), what computes by nominal
    bf16 rate (989 ÷ 312 TFLOP/s), partitions at the same share of the SMs."""
    bandwidth, compute, sms = 4.8 / 2.04, 989 / 312, 108

    def slower(part: Surface) -> Surface:
        return Surface(
            base=_short(part.base * bandwidth),
            per_request=_short(part.per_request * compute),
            per_kv_token=_short(part.per_kv_token * bandwidth),
            points=part.points,
        )

    layouts = []
    for part in like.layouts:
        finetune = 2 * round(part.finetune_sms / like.sms * sms / 2)
        layouts.append(
            part.model_copy(
                update={
                    "finetune_sms": finetune,
                    "decode_sms": sms - finetune if part.kind == "split" else 0,
                    "alone_ms": slower(part.alone_ms),
                    "beside_ms": part.beside_ms and slower(part.beside_ms),
                    "sharing": None,
                }
            )
        )
    return like.model_copy(
        update={
            "device": "NVIDIA A100 80GB",
            "sms": sms,
            "layouts": tuple(layouts),
            "tasklets": _slower(like.tasklets, compute),
            "arena_pages": _arena_pages(80),
            "prefill_ms_per_token": _short(like.prefill_ms_per_token * compute),
            "prefill_ms_per_token_and_context": _short(like.prefill_ms_per_token_and_context * compute),
            "provenance": {"all": f"computed: the H200's, memory-bound × {bandwidth:.2f}, computing × {compute:.2f}"},
        }
    )


def _non_negative(columns: Array, target: Array) -> Array:
    """Least squares with no coefficient below zero: the best of all subsets of the (three) columns."""
    width = columns.shape[1]
    best, best_error = np.zeros(width), float(target @ target)
    for size in range(1, width + 1):
        for chosen in combinations(range(width), size):
            found = np.linalg.lstsq(columns[:, chosen], target, rcond=None)[0]
            error = float(((columns[:, chosen] @ found - target) ** 2).sum())
            if (found >= 0).all() and error < best_error:
                best, best_error = np.zeros(width), error
                best[list(chosen)] = found
    return best


def _columns(rows: list[dict[str, Any]]) -> tuple[Array, Array, Array]:
    batch, context, ms = (np.array([r[key] for r in rows], dtype=float) for key in ("bs", "ctx", "p50"))
    return batch, context, ms


def _level(rows: list[dict[str, Any]], key: str) -> Surface:
    """A quantity without a trend in batch and KV tokens: its median and what each point is of it."""
    batch, context, _ = _columns(rows)
    values = np.array([r[key] for r in rows], dtype=float)
    middle = float(np.median(values))
    return Surface(base=_short(middle), points=_points(batch, context, values / middle))


def _again(probe: dict[str, Any], slices: dict[str, Any]) -> list[dict[str, Any]]:
    """Cells of the grid that the other two programs measured too, as rows of the grid."""
    rows: list[dict[str, Any]] = []

    def add(layout: str, decode_sms: int, batch: int, found: dict[str, Any], seconds: float = 0.0) -> None:
        part = 0 if layout == "whole" else 132 - decode_sms
        rows.append(
            {"layout": layout, "ft": part, "bs": batch, "ctx": 1024, "beside": "mix" if part else None,
             "p50": found["p50"], "p99": found.get("p99"), "ft_tokens_s": found.get("ft"), "seconds": seconds}
        )  # fmt: skip

    for batch in (32, 128):
        for decode_sms, base in {r["dec"]: r["base"] for r in probe["hybrid"][str(batch)]}.items():
            add("split" if decode_sms else "whole", decode_sms or 132, batch, {"p50": base})
        add("whole", 132, batch, slices["dec"][str(batch)])
        for decode_sms, found in slices["spatial"].items():
            add("split", int(decode_sms), batch, found[str(batch)], _SLICES_SECONDS)
            add("confined", int(decode_sms), batch, found[f"conf{batch}"], _SLICES_SECONDS)
    return rows


def _merged(rows: list[dict[str, Any]], speed: Callable[[float, float], float]) -> list[dict[str, Any]]:
    """One row per (batch, context): means of p50, of p99/p50 − 1 and of the finetune speed over all runs."""
    cells: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["bs"], row["ctx"]), []).append(row)
    merged = []
    for (batch, context), found in cells.items():
        tails = [max(r["p99"] / r["p50"] - 1, 1e-3) for r in found if r["p99"]]
        speeds = [speed(r["ft_tokens_s"], r.get("seconds", _GRID_SECONDS)) for r in found if r.get("ft_tokens_s")]
        p50 = float(np.mean([r["p50"] for r in found]))
        merged.append(
            {"bs": batch, "ctx": context, "p50": p50, "tail": float(np.mean(tails)),
             "speed": float(np.mean(speeds)) if speeds else None}
        )  # fmt: skip
    return merged


def _sharing(
    probe: dict[str, Any], decode_sms: int, durations: list[float], speed: float
) -> tuple[float, float] | None:
    """Speeds (whole device, part) of two micro-batches at once, from steps that had both: what the step took beyond
    decode against the work that was put behind it, and the work that is left over."""
    micro_batch = sum(durations)
    found = []
    for row in probe["hybrid"]["32"]:
        if row["dec"] != decode_sms or row["slo"] not in (40, 50):
            continue
        behind = filled(durations, row["slo"] - row["base"])
        took = row["p50"] - row["base"]
        work = row["ft"] / 2048 * micro_batch * row["p50"] / 1e3
        found.append((behind / took, (work - behind - speed * row["base"]) / took))
    return tuple(_short(float(np.mean(side))) for side in zip(*found, strict=True)) if found else None  # type: ignore[return-value]


def filled(durations: list[float], budget_ms: float) -> float:
    """Mean work per step when the next tasklets are put behind it as long as they fit the budget."""
    steps, at, work = 0, 0, 0.0
    while at < 4 * len(durations):
        used = 0.0
        while used + durations[at % len(durations)] <= budget_ms:
            used += durations[at % len(durations)]
            at += 1
        steps, work = steps + 1, work + used
        if not used:
            break
    return work / steps


def _noise(log: str) -> tuple[tuple[float, float], ...]:
    """The shape of the spread from the p50, p90 and p99 of many conditions; mirrored below the median."""
    found = re.findall(r"p50 ([\d.]+) p90 ([\d.]+) p99 ([\d.]+)", log)
    shares = [(float(p90) - float(p50)) / (float(p99) - float(p50)) for p50, p90, p99 in found]
    p90 = _short(float(np.median(shares)))
    return ((0.0, -p90), (0.1, -p90), (0.5, 0.0), (0.9, p90), (0.99, 1.0), (1.0, _short(1 + (1 - p90) / 9)))


def _typical(tail: Surface) -> float:
    """Mean of a spread over its points."""
    return _short(tail.base * float(np.mean([factor for *_, factor in tail.points])))


def _slower(part: TaskletProfile, factor: float) -> TaskletProfile:
    return part.model_copy(
        update={
            "forward_ms": tuple(_short(ms * factor) for ms in part.forward_ms),
            "head_ms": tuple(_short(ms * factor) for ms in part.head_ms),
            "backward_ms": tuple(_short(ms * factor) for ms in part.backward_ms),
            "optimizer_ms": _short(part.optimizer_ms * factor),
        }
    )


def _arena_pages(gib: float) -> int:
    return int((0.9 * gib * _GIB - _WEIGHT_BYTES - 2 * _GIB) // PAGE_BYTES)


def _points(batch: Array, context: Array, factors: Array) -> tuple[tuple[float, float, float], ...]:
    return tuple((float(b), float(c), _short(float(f))) for b, c, f in zip(batch, context, factors, strict=True))


def _short(value: float) -> float:
    """Five significant digits: more than any of this is known to."""
    return float(f"{value:.5g}")


def main(arguments: list[str] | None = None) -> None:
    """Write one profile; see the module's head."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    measured = kinds.add_parser("h200")
    for name in ("--grid", "--probe", "--slices", "--fused", "--log"):
        measured.add_argument(name, type=Path, required=True)
    other = kinds.add_parser("ada6000")
    other.add_argument("--coefficients", type=Path, required=True)
    for sub in (other, scaled := kinds.add_parser("a100")):
        sub.add_argument("--like", type=Path, required=True)
    for sub in (measured, other, scaled):
        sub.add_argument("out", type=Path)
    given = parser.parse_args(arguments)
    if given.kind == "h200":
        paths = (given.grid, given.probe, given.slices, given.fused)
        grid, probe, slices, fused = (json.loads(path.read_text()) for path in paths)
        profile = h200(grid["rows"], probe, slices, fused, given.log.read_text())
    elif given.kind == "ada6000":
        lines = [line for line in given.coefficients.read_text().splitlines() if not line.startswith("#")]
        profile = ada6000(list(csv.DictReader(lines)), read_profile(given.like))
    else:
        profile = a100(read_profile(given.like))
    given.out.write_text(profile.model_dump_json(exclude_defaults=True) + "\n")


if __name__ == "__main__":
    main()
