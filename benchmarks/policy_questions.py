"""Parts of benchmarks/policies.py: Harli's claim on the Ada6000 model, and questions that the paper leaves open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.policy_bench import EVERY, FILES, MAX_TOKENS, SEEDS, WINDOW_S, Bench, Pool, knobs_of, merit, short
from core.policy import bind
from core.policy.types import WHOLE
from core.predictor.stale import MissWatch
from core.predictor.two_stage import TwoStagePredictor
from core.simulate.command import MISS, Load, Machine, endless, machine
from core.simulate.device import HEAD_PARTS, Device, Program
from core.simulate.engine import Simulation
from core.simulate.measure import profile_device
from core.simulate.outcome import Outcome
from core.simulate.profile import DeviceProfile, LayoutProfile, Surface, read_profile
from core.simulate.scenario import FinetuneJob, Scenario
from core.workload.traces import cut, within

Say = Callable[[str], None]
PAPER_TARGET_MS = 40.0
PAPER = {"average": 0.462, "best": 0.92}


# ---- the paper's claim ----------------------------------------------------------------------------------------------


def headline(bench: Bench, say: Say) -> dict[str, Any]:
    """Two Ada6000 serve half the trace each and train, against one that serves it all and one that trains; and the best
    fixed partition, for each trace and load, under each assumed curve of finetune speed."""
    curves = {
        "in proportion to the SMs, slowed beside decode as on the H200": ("linear", True, 1.0),
        "in proportion to the SMs, not slowed beside decode": ("linear", False, 1.0),
        "as the H200's against its SMs, slowed beside decode": ("h200", True, 1.0),
        "as the H200's against its SMs, not slowed beside decode": ("h200", False, 1.0),
        "in proportion, slowed, the whole device 1.3 times as fast": ("linear", True, 1 / 1.3),
        "in proportion, slowed, the whole device 1.3 times as slow": ("linear", True, 1.3),
    }
    answer = []
    for name, (shape, slowed, slower) in curves.items():
        on = _machine(assumed(read_profile("ada6000"), read_profile("h200"), shape, slowed, slower))
        cells = []
        for trace in FILES:
            for load in (1, 2):
                every = EVERY.get((trace, "ada6000"), 1) * load
                half = bench.windows(trace, "ada6000", every=2 * every)
                seconds = WINDOW_S["ada6000"] * bench.scale
                harli, hybrid = (bench.runs(half, on, seconds, bind(p), PAPER_TARGET_MS) for p in ("harli", "hybrid"))
                fixed = [bench.runs(half, on, seconds, bind("static", **k), 1e9) for k in knobs_of("static", on.device)]
                static = max(fixed, key=lambda pool: merit(pool, PAPER_TARGET_MS))
                cells.append(_claim(trace, every, harli, hybrid, static))
        say(f"headline: {name}: {_range(cells, 'harli_gain_over_two_gpus')}")
        answer.append(
            {
                "finetune_speed": name,
                "over_two_gpus": _range(cells, "harli_gain_over_two_gpus"),
                "over_static": _range(cells, "harli_gain_over_static"),
                "hybrid_over_two_gpus": _range(cells, "hybrid_gain_over_two_gpus"),
                "cells": cells,
            }
        )
    return {"target_ms": PAPER_TARGET_MS, "paper": PAPER, "curves": answer}


def _claim(trace: str, every: int, harli: Pool, hybrid: Pool, static: Pool) -> dict[str, Any]:
    two_gpus = harli.exclusive / 2  # per GPU: one of two trains
    static_tokens = static.mean_tokens_s if static.holds(PAPER_TARGET_MS) else 0.0
    return {
        "trace": trace,
        "every": every,
        "harli_tokens_s": round(harli.mean_tokens_s),
        "hybrid_tokens_s": round(hybrid.mean_tokens_s),
        "static_tokens_s": round(static_tokens),
        "exclusive_tokens_s": round(harli.exclusive),
        "harli_holds": harli.holds(PAPER_TARGET_MS),
        "hybrid_holds": hybrid.holds(PAPER_TARGET_MS),
        "harli_gain_over_two_gpus": round(harli.mean_tokens_s / two_gpus - 1, 3),
        "hybrid_gain_over_two_gpus": round(hybrid.mean_tokens_s / two_gpus - 1, 3),
        "harli_gain_over_static": round(harli.mean_tokens_s / static_tokens - 1, 3) if static_tokens else None,
    }


def _range(cells: Sequence[dict[str, Any]], key: str) -> dict[str, float]:
    gains = [cell[key] for cell in cells if cell[key] is not None]
    return {"least": min(gains), "average": round(float(np.mean(gains)), 3), "best": max(gains)}


def assumed(ada: DeviceProfile, like: DeviceProfile, shape: str, slowed: bool, slower: float) -> DeviceProfile:
    """The Ada6000 with finetune speeds of another curve: against SMs, beside decode, and on the whole device."""
    splits = sorted((p for p in like.layouts if p.kind == "split"), key=lambda p: p.finetune_sms)
    share = [0.0, *(p.finetune_sms / like.sms for p in splits), 1.0]
    alone = [0.0, *(p.alone_speed for p in splits), 1.0]
    kept = [p.speed.base / p.alone_speed for p in splits if p.speed]

    def part(layout: LayoutProfile) -> LayoutProfile:
        if layout.kind == "whole":
            return layout
        at = layout.finetune_sms / ada.sms
        speed = at if shape == "linear" else float(np.interp(at, share, alone))
        beside = float(np.interp(at, share[1:-1], kept)) if slowed else 1.0
        return layout.model_copy(update={"alone_speed": speed, "speed": Surface(base=speed * beside)})

    tasklets = ada.tasklets
    times = {
        name: tuple(ms * slower for ms in getattr(tasklets, name)) for name in ("forward_ms", "head_ms", "backward_ms")
    }
    return ada.model_copy(
        update={
            "layouts": tuple(part(layout) for layout in ada.layouts),
            "tasklets": tasklets.model_copy(update=times | {"optimizer_ms": tasklets.optimizer_ms * slower}),
        }
    )


def _machine(profile: DeviceProfile) -> Machine:
    device = Device(profile)
    return Machine(device, profile_device(device))


# ---- open questions -------------------------------------------------------------------------------------------------


def questions(bench: Bench, say: Say) -> dict[str, Any]:
    """One entry per question."""
    asked: dict[str, Callable[[Bench], Any]] = {
        "batch_sizes": batch_sizes,
        "bursts": bursts,
        "variable_micro_batches": variable_micro_batches,
        "cost_of_the_margin": margins,
        "jobs": jobs,
        "adapter_access": adapter_access,
        "lora_rank": ranks,
        "granularity": granularity,
        "prefill_here": prefill_here,
    }
    answers = {}
    for name, ask in asked.items():
        say(f"question: {name}")
        answers[name] = ask(bench)
    return answers


def batch_sizes(bench: Bench) -> list[dict[str, Any]]:
    """H200, steady load of so many requests of 1,024 tokens: what each batch size leaves at each target, and what
    partitions add to time slices."""
    on, rows = machine("h200"), []
    steps = max(50, int(600 * bench.scale))
    for batch in (1, 8, 16, 32, 64, 96, 128, 192, 256):
        load = Load(batch, batch * 1024)
        solo = on.device.cell(WHOLE, on.device.padded(batch), load.kv_tokens, 1024).alone_ms
        for x in (1.25, 1.5, 2.0, 4.0):
            tokens = {}
            for policy in ("tasklet_slices", "harli", "hybrid"):
                found = []
                for seed in SEEDS:
                    scenario = Scenario(endless(load, int(steps * x)), steps * solo * x / 1e3, x * solo, seed=seed)
                    outcome = Simulation(scenario, on.device, bind(policy), on.predictor()).run()
                    found.append(outcome.summary().finetune_tokens_s)
                tokens[policy] = float(np.mean(found))
            rows.append(
                {
                    "batch": batch, "target_x": x, "solo_ms": short(solo),
                    "tokens_s": {policy: round(value) for policy, value in tokens.items()},
                    "hybrid_exclusive_share": round(tokens["hybrid"] / _exclusive(on), 3),
                    "hybrid_over_slices": round(tokens["hybrid"] / max(tokens["tasklet_slices"], 1.0), 2),
                }
            )  # fmt: skip
    return rows


def bursts(bench: Bench) -> list[dict[str, Any]]:
    """Steps over the target on a steady and on a bursty trace, and how they come."""
    rows = []
    for trace in ("azure_conv", "azure_code"):
        for device in WINDOW_S:
            on = machine(device)
            windows, seconds = bench.windows(trace, device), WINDOW_S[device] * bench.scale
            solo = bench.runs(windows, on, seconds, bind("solo"), 1e9)
            base = solo.itl_p99
            for x in (1.5, 2.0):
                for policy in ("solo", "harli", "hybrid"):
                    pool = bench.runs(windows, on, seconds, bind(policy), x * base)
                    over = pool.gaps > x * base
                    rows.append(
                        {
                            "trace": trace, "device": device, "target_x": x, "policy": policy,
                            "steps_over": round(float(over.mean()), 5),
                            "attainment": round(pool.attainment(x * base), 5),
                            "longest_run_over": _longest_run(over),
                            "worst_gap_x_target": short(float(pool.gaps.max()) / (x * base)),
                            "tokens_s": round(pool.mean_tokens_s),
                        }
                    )  # fmt: skip
    return rows


def variable_micro_batches(bench: Bench) -> list[dict[str, Any]]:
    """Micro-batches of one size, against sizes that change with each, under a predictor that knows tasklets by kind."""
    on, rows = machine("h200"), []
    windows, seconds = bench.windows("azure_conv", "h200"), WINDOW_S["h200"] * bench.scale
    base = bench.runs(windows, on, seconds, bind("solo"), 1e9).itl_p99
    for sizes in ((2048,), (1024, 1536, 2048), (256, 512, 1024, 2048)):
        programs = [Program(on.device, head_parts=HEAD_PARTS, tokens=tokens) for tokens in sizes]
        for x in (1.5, 2.0, 4.0):
            for policy in ("tasklet_slices", "harli", "hybrid"):
                pool = bench.runs(windows, on, seconds, bind(policy), x * base, programs=programs)
                most = sum(p.tokens for p in programs) / sum(p.total_ms for p in programs) * 1e3
                rows.append(
                    {
                        "tokens": sizes, "target_x": x, "policy": policy,
                        "miss_rate": round(pool.missed / max(pool.planned, 1), 4),
                        "steps_over": round(float((pool.gaps > x * base).mean()), 4),
                        "attainment": round(pool.attainment(x * base), 4), "tokens_s": round(pool.mean_tokens_s),
                        "share_of_the_same_alone": round(pool.mean_tokens_s / most / on.device.alone_speed(WHOLE), 3),
                    }
                )  # fmt: skip
    return rows


class Unmoved(TwoStagePredictor):
    """Neither stale nor reminded of a clock that drops, however many bounds are missed."""

    def observe_step(self, *measured: Any, **named: Any) -> bool:
        missed = super().observe_step(*measured, **named)
        self._drop = 1.0
        return missed


class Unwatched(Machine):
    """With such a predictor."""

    def predictor(self, miss: float = MISS) -> TwoStagePredictor:
        fresh = super().predictor(miss)
        fresh.__class__ = Unmoved
        fresh._watch = MissWatch(misses=10**9)
        return fresh


def margins(bench: Bench) -> list[dict[str, Any]]:
    """Finetune throughput against the share of steps that the bound lets outlast it (0.5: the median, no margin). So
    many misses would look like a clock that drops, and stop finetuning as a sign that the predictor is stale; here they
    do neither."""
    plain, rows = machine("h200"), []
    on = Unwatched(plain.device, plain.profile)
    windows, seconds = bench.windows("azure_conv", "h200"), WINDOW_S["h200"] * bench.scale
    base = bench.runs(windows, on, seconds, bind("solo"), 1e9).itl_p99
    for x in (1.25, 1.5, 2.0, 4.0):
        for miss in (0.5, 0.1, 0.05, 0.01, 0.005, 0.002):
            pool = bench.runs(windows, on, seconds, bind("hybrid"), x * base, miss=miss)
            rows.append(
                {
                    "target_x": x, "miss": miss, "tokens_s": round(pool.mean_tokens_s),
                    "steps_over": round(float((pool.gaps > x * base).mean()), 5),
                    "attainment": round(pool.attainment(x * base), 5),
                    "miss_rate": round(pool.missed / max(pool.planned, 1), 5),
                }
            )  # fmt: skip
    return rows


def jobs(bench: Bench) -> list[dict[str, Any]]:
    """Ten minutes of azure_conv with finetune jobs that come by themselves: deadlines, freshness, cost per job."""
    on, seconds = machine("h200"), 600.0 * bench.scale
    arrivals = cut(within(bench.trace("azure_conv"), MAX_TOKENS), 600.0, seconds)
    windows = bench.windows("azure_conv", "h200")
    base = bench.runs(windows, on, WINDOW_S["h200"] * bench.scale, bind("solo"), 1e9).itl_p99
    exclusive = _exclusive(on)
    rows = []
    for load in (0.3, 0.6):
        made = [_jobs(exclusive * load, exclusive, seconds, seed) for seed in SEEDS]
        for policy in ("two GPUs", "tasklet_slices", "harli", "hybrid"):
            outcomes = []
            for seed, given in zip(SEEDS, made, strict=True):
                alone = policy == "two GPUs"
                scenario = Scenario([] if alone else arrivals, seconds, 1.5 * base, jobs=given, seed=seed)
                one = bind("tasklet_slices" if alone else policy)
                outcomes.append(Simulation(scenario, on.device, one, on.predictor()).run())
            figures = _jobs_row(outcomes, seconds, 1 if policy == "two GPUs" else 0)
            rows.append({"policy": policy, "offered": load} | figures)
    return rows


def _jobs(rate: float, exclusive: float, seconds: float, seed: int) -> tuple[FinetuneJob, ...]:
    """Jobs of 40,000 to 160,000 tokens at `rate` tokens/s in all, due in five times what they take alone."""
    random = np.random.default_rng(seed)
    found, now = [], 0.0
    while True:
        now += float(random.exponential(100_000 / rate))
        if now > 0.8 * seconds:
            return tuple(found)
        tokens = int(random.integers(40_000, 160_001))
        tenant = f"tenant-{random.integers(3)}"
        due = now + 5 * tokens / exclusive
        found.append(FinetuneJob(f"job-{len(found)}", tenant, arrival_s=now, tokens=tokens, deadline_s=due))


def _jobs_row(outcomes: Sequence[Outcome], seconds: float, extra_gpus: int) -> dict[str, Any]:
    ended = [run for outcome in outcomes for run in outcome.trainer.done]
    due = [job for outcome in outcomes for job in outcome.scenario.jobs if job.deadline_s and job.deadline_s <= seconds]
    took = {id(run.job): (run.ended_ms or 0.0) / 1e3 for run in ended}
    met = {id(run.job) for run in ended if took[id(run.job)] <= (run.job.deadline_s or 0.0)}
    fresh = [took[id(run.job)] - run.job.arrival_s for run in ended]
    return {
        "jobs": sum(len(outcome.scenario.jobs) for outcome in outcomes),
        "ended": len(ended),
        "deadlines_missed": round(1 - sum(id(job) in met for job in due) / max(len(due), 1), 3),
        "freshness_p50_s": short(float(np.median(fresh))) if fresh else None,
        "freshness_p95_s": short(float(np.quantile(fresh, 0.95))) if fresh else None,
        "extra_gpu_s_per_job": round(extra_gpus * seconds * len(outcomes) / max(len(ended), 1), 1),
        "attainment": round(float(np.mean([outcome.summary().attainment for outcome in outcomes])), 4),
    }


def adapter_access(bench: Bench) -> list[dict[str, Any]]:
    """Sixteen adapters get new data at the same rate and are asked for unequally: share of requests that an adapter
    older than its data answers, when jobs go by their coming and when they go by how often their adapter is used."""
    on, seconds = machine("h200"), 600.0 * bench.scale
    arrivals = cut(within(bench.trace("azure_conv"), MAX_TOKENS), 600.0, seconds)
    rows = []
    for exponent in (0.0, 1.0, 2.0):
        share = np.arange(1, 17, dtype=float) ** -exponent
        share /= share.sum()
        for order in ("first come", "most used first"):
            stale = []
            for seed in SEEDS:
                random = np.random.default_rng(seed)
                times = np.sort(random.uniform(0, 0.8 * seconds, max(2, round(seconds / 8))))
                adapters = random.permutation(np.arange(len(times)) % 16)
                given = tuple(
                    FinetuneJob(
                        f"job-{number}", arrival_s=float(time), tokens=60_000, deadline_s=float(time),
                        priority=round(1000 * share[adapter]) if order == "most used first" else 0,
                    )
                    for number, (time, adapter) in enumerate(zip(times, adapters, strict=True))
                )  # fmt: skip
                scenario = Scenario(arrivals, seconds, 12.0, jobs=given, seed=seed)
                outcome = Simulation(scenario, on.device, bind("hybrid"), on.predictor()).run()
                ended = {run.job.job_id: (run.ended_ms or 0.0) / 1e3 for run in outcome.trainer.done}
                stale.append(_stale(times, adapters, share, ended, seconds))
            answered = round(float(np.mean(stale)), 4)
            rows.append({"zipf_exponent": exponent, "order": order, "requests_answered_stale": answered})
    return rows


def _stale(
    times: np.ndarray, adapters: np.ndarray, share: np.ndarray, ended: dict[str, float], seconds: float
) -> float:
    """Share of the requests, over time and adapters, that come while newer data of their adapter is not trained."""
    total = 0.0
    for adapter in range(len(share)):
        until = 0.0
        for number in np.flatnonzero(adapters == adapter):
            start, end = max(float(times[number]), until), ended.get(f"job-{number}", seconds)
            total += share[adapter] * max(0.0, end - start)
            until = max(until, end)
    return total / seconds


def ranks(bench: Bench) -> list[dict[str, Any]]:
    """LoRA rank: more work in the adapters (counted, not measured) and more state in memory."""
    rows = []
    for device in WINDOW_S:
        plain = read_profile(device)
        windows, seconds = bench.windows("azure_conv", device), WINDOW_S[device] * bench.scale
        base = bench.runs(windows, machine(device), seconds, bind("solo"), 1e9).itl_p99
        for rank in (8, 16, 64, 256):
            # an adapter's products count three times (forward, gradient of input, of weights), the frozen ones twice
            slower = (1 + 1.5 * 41.9e6 * rank / 16 / 8.03e9) / (1 + 1.5 * 41.9e6 / 8.03e9)
            pages = round(plain.tasklets.state_pages * rank / 16)
            on = _machine(
                plain.model_copy(update={"tasklets": plain.tasklets.model_copy(update={"state_pages": pages})})
            )
            programs = [Program(on.device, head_parts=HEAD_PARTS, slower=slower)]
            pool = bench.runs(windows, on, seconds, bind("hybrid"), 1.5 * base, programs=programs)
            rows.append(
                {"device": device, "rank": rank, "tokens_s": round(pool.mean_tokens_s),
                 "attainment": round(pool.attainment(1.5 * base), 4), "work_lost_s": round(pool.lost_ms / 1e3, 1)}
            )  # fmt: skip
    return rows


def granularity(bench: Bench) -> list[dict[str, Any]]:
    """Tasklets of half a layer to eight layers, and a head that is not cut."""
    on, rows = machine("h200"), []
    windows, seconds = bench.windows("azure_conv", "h200"), WINDOW_S["h200"] * bench.scale
    base = bench.runs(windows, on, seconds, bind("solo"), 1e9).itl_p99
    shapes: dict[str, dict[str, int]] = {
        "half a layer": {"layer_parts": 2, "head_parts": 6},
        "a layer": {"head_parts": HEAD_PARTS},
        "a layer, head whole": {"head_parts": 1},
        "two layers": {"layers": 2, "head_parts": HEAD_PARTS},
        "eight layers": {"layers": 8, "head_parts": 1},
    }
    for name, shape in shapes.items():
        for x in (1.25, 1.5, 2.0, 4.0):
            for policy in ("tasklet_slices", "hybrid"):
                pool = bench.runs(windows, on, seconds, bind(policy), x * base, programs=[Program(on.device, **shape)])
                rows.append(
                    {"tasklet": name, "target_x": x, "policy": policy, "tokens_s": round(pool.mean_tokens_s),
                     "attainment": round(pool.attainment(x * base), 4)}
                )  # fmt: skip
    return rows


def prefill_here(bench: Bench) -> list[dict[str, Any]]:
    """An engine that does its own prefill: TTFT beside finetuning."""
    rows = []
    for trace in ("azure_conv", "azure_code"):
        on, seconds = machine("h200"), WINDOW_S["h200"] * bench.scale
        windows = bench.windows(trace, "h200")
        base = bench.runs(windows, on, seconds, bind("solo"), 1e9).itl_p99
        for policy in ("solo", "tasklet_slices", "harli", "hybrid"):
            outcomes = []
            for seed, part in zip(SEEDS, windows, strict=True):
                scenario = Scenario(part, seconds, 2 * base, prefill="here", seed=seed)
                outcomes.append(Simulation(scenario, on.device, bind(policy), on.predictor()).run())
            ttft = np.array([r.first_ms - r.arrival_s * 1e3 for o in outcomes for r in o.finished])
            summaries = [outcome.summary() for outcome in outcomes]
            rows.append(
                {"trace": trace, "policy": policy, "ttft_p50_ms": short(float(np.median(ttft))),
                 "ttft_p99_ms": short(float(np.quantile(ttft, 0.99))),
                 "attainment": round(float(np.mean([s.attainment for s in summaries])), 4),
                 "tokens_s": round(float(np.mean([s.finetune_tokens_s for s in summaries])))}
            )  # fmt: skip
    return rows


def _exclusive(on: Machine) -> float:
    program = Program(on.device)
    return program.tokens / program.total_ms * on.device.alone_speed(WHOLE) * 1e3


def _longest_run(over: np.ndarray) -> int:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], over, [False]]).astype(int)))
    return int(max((end - start for start, end in list(pairwise(edges))[::2]), default=0))
