"""What finetuning costs decode, and what it gets, at every layout: the frontier of one model on one GPU.

    python -m benchmarks.frontier --model llama-3-8b --attention fa3 --batches 32 128

One engine (random weights, LoRA serving on with one adapter in use unless --lora none, overlap scheduler on) decodes
fixed batches of 512-token prompts. Operating points are swept once: plain SGLang, this runtime without a job, each
split alone and with its finetune part kept busy, confined parts, tasklets behind the step, and both together (fewer of
them at batches other than 32 and 128); then, on a profile made of them, the policies run live at a list of targets. One
point more changes layout, tasklets and delays on every stream at random: its tokens have to be the plain ones. Every
point is one `generate` call whose requests carry the point's number in their ids; the scheduler process reads it there,
so nothing else has to be told at run time. The results file is written after every point; --dry only lists the points.

A gap is the time between two results in the scheduler. Answers are asked for whole and sent when they end. SGLang would
else send what it has of them every 50 tokens, in one step for all requests, since they decode in lock step; that step
would be the p99. The step in which all end does not count either.

A row's finetune_tokens_s counts tasklets that ended while the point was measured, each for its share of a micro-batch
by its time on the whole device; micro-batches have no padding. outlasted: by layout, how many of a policy's steps took
longer than their bound, and ms and bound of the longest; early_ms: what the first two steps of the point took, which
may hold time in which the GPU waited for their launch, and which no policy learns from.
"""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.record import RESULTS, provenance, write
from core.policy import POLICIES
from core.policy.types import WHOLE, Layout

FOLDER = "HARLI_FRONTIER"
PROMPT = 512
WHOLE_ANSWER = 1_000_000  # tokens after which SGLang sends on what it has of an answer that is asked for whole
FULL = (32, 128)  # batches whose points are all swept
SKIP = 10  # first steps of a point: the batch is still filling
MODELS: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 128256, "rope_theta": 500000.0,
    },
    "qwen2.5-7b": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
        "rope_theta": 1000000.0,
    },
}  # fmt: skip
COMMON = {
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "bos_token_id": 0,
    "eos_token_id": 1, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TARGETS: dict[int, tuple[float, ...]] = {
    8: (7, 8, 9, 11, 13, 16, 28), 32: (7.5, 8, 9, 11, 13, 16, 28, 50), 64: (9, 11, 13, 16, 20, 28, 50),
    128: (12, 14, 16, 18, 20, 28, 34, 50),
}  # fmt: skip


@dataclass(frozen=True)
class Point:
    """mode plain: SGLang untouched; fixed: `layout`, its finetune part kept busy when `busy`, `after` tasklets behind
    each step; random: any layout, tasklets and delays; policy: `policy` plans for a p99 gap of `target_ms`."""

    batch: int
    mode: str
    steps: int
    layout: Layout = WHOLE
    busy: bool = False
    after: int = 0
    policy: str = ""
    target_ms: float = 0.0

    @property
    def name(self) -> str:
        if self.mode == "policy":
            return self.policy
        if self.mode in ("plain", "random"):
            return self.mode
        if self.busy:
            return "static + slices" if self.after else self.layout.kind.replace("split", "static")
        return "slices" if self.after else "solo"

    @property
    def trains(self) -> bool:
        """Whether there is a job."""
        return self.busy or self.after > 0 or self.mode in ("random", "policy")


def sweep(batch: int, splits: list[int], sms: int, steps: int) -> list[Point]:
    """The fixed points of one batch size; plain and no job in turn, so that drift hits both."""
    points = [Point(batch, mode, steps) for _ in range(2) for mode in ("plain", "fixed")]
    parts = [Layout("split", d, sms - d) for d in splits]
    if batch not in FULL:
        points += [Point(batch, "fixed", steps // 2 + SKIP, part) for part in parts[::2]]
        points += [Point(batch, "fixed", steps, part, busy=True) for part in parts[::2]]
        return points + [Point(batch, "fixed", steps, after=k) for k in (1, 6)]
    confined = [Layout("confined", 0, part.finetune_sms) for part in parts]
    points += [Point(batch, "fixed", steps // 2 + SKIP, part) for part in parts]
    points += [Point(batch, "fixed", steps, part, busy=True) for part in parts + confined]
    points += [Point(batch, "fixed", steps, after=k) for k in (1, 3, 6, 12)]
    middle = parts[len(parts) // 3 :]
    return points + [Point(batch, "fixed", steps, part, busy=True, after=k) for part in middle[::2] for k in (2, 6)]


def planned(options: Any) -> list[Point]:
    """All points in the order in which they are measured: what is worth most comes first within each kind."""
    batches, steps = options.batches, options.steps
    if options.profile:
        points = [Point(batch, "plain", steps) for batch in batches]
    else:
        points = [p for batch in batches for p in sweep(batch, options.splits, options.sms, steps)]
        points += [Point(batch, "random", steps) for batch in batches[:1]]
    chosen = [(policy, 1) for policy in options.policies] + [(policy, 3) for policy in options.few]
    points += [
        Point(batch, "policy", steps, policy=policy, target_ms=target)
        for policy, every in chosen
        for batch in batches
        for target in TARGETS.get(batch, ())[-1::-every]
    ]
    return points


def seconds(point: Point) -> float:
    """About what a point takes, from a run of 2026-11-30: its steps, the prompts' prefill, and going over to it."""
    gap_ms = point.target_ms or (30.0 if point.busy or point.after or point.mode == "random" else 15.0)
    return (point.steps + SKIP) * min(gap_ms, 50.0) / 1e3 + 0.5 + point.batch / 128


# ---- this process: requests ------------------------------------------------------------------------------------------


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--model", choices=MODELS, default="llama-3-8b")
    arguments.add_argument("--attention", choices=("fa3", "triton"), default="fa3")
    arguments.add_argument("--batches", type=int, nargs="+", default=[32, 128])
    arguments.add_argument("--splits", type=int, nargs="+", default=[112, 96, 80, 64, 48, 32])
    arguments.add_argument("--sms", type=int, default=132, help="SMs of the GPU")
    arguments.add_argument("--steps", type=int, default=250)
    arguments.add_argument("--policies", nargs="*", choices=POLICIES, default=["hybrid", "harli", "tasklet_slices"])
    arguments.add_argument(
        "--few",
        nargs="*",
        choices=POLICIES,
        default=["step_slices", "chunked"],
        help="policies that are run at every third target only",
    )
    arguments.add_argument("--micro-batch-tokens", type=int, default=2048)
    arguments.add_argument("--rank", type=int, default=16)
    arguments.add_argument(
        "--lora",
        choices=("harli", "csgmv", "triton", "none"),
        default="harli",
        help="the kernels that serve adapters: harli: core/serving/lora_kernels.py; csgmv, triton: SGLang's",
    )
    arguments.add_argument(
        "--profile",
        metavar="FILE",
        help="results/…_profile.json of an earlier run, for the policies to plan with; fixed points are then left out",
    )
    arguments.add_argument("--seconds", type=float, default=1e9, help="stop starting points after so long")
    arguments.add_argument("--name", default="frontier")
    arguments.add_argument("--dry", action="store_true", help="list the points, and about what they take")
    options = arguments.parse_args()
    points = planned(options)
    if options.dry:
        for point in points:
            print(f"{seconds(point):5.1f} s  batch {point.batch:>3}  {point.name} {point.layout} +{point.after}"
                  + (f" @{point.target_ms:g} ms" if point.target_ms else ""))  # fmt: skip
        print(f"{len(points)} points, about {sum(map(seconds, points)):.0f} s")
        return
    with tempfile.TemporaryDirectory() as folder:
        _serve(Path(folder), options, points)


def _serve(folder: Path, options: Any, points: list[Point]) -> None:
    """Run the points that there is time for."""
    from sglang.srt.entrypoints.engine import Engine

    began = time.time()
    os.environ |= {FOLDER: str(folder), "SGLANG_FORCE_STREAM_INTERVAL": str(WHOLE_ANSWER)}
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODELS[options.model] | COMMON))
    plan = {"options": vars(options), "points": [asdict(point) for point in points]}
    (folder / "plan.json").write_bytes(msgspec.json.encode(plan))
    if options.profile:
        (folder / "profile.json").write_bytes(Path(options.profile).read_bytes())

    lora: dict[str, Any] = {}
    if options.lora != "none":
        lora = {
            "enable_lora": True, "max_lora_rank": options.rank, "max_loras_per_batch": 2,
            "lora_target_modules": list(MODULES), "lora_backend": options.lora if options.lora == "triton" else "csgmv",
        }  # fmt: skip

    class FrontierEngine(Engine):  # type: ignore[misc]
        run_scheduler_process_func = staticmethod(run_scheduler)

    engine = FrontierEngine(
        model_path=str(model), load_format="dummy", skip_tokenizer_init=True, attention_backend=options.attention,
        sampling_backend="pytorch", grammar_backend="none", mem_fraction_static=0.28, log_level="warning",
        cuda_graph_bs_decode=sorted({8, *options.batches}), max_running_requests=max(options.batches),
        **lora,
    )  # fmt: skip
    print(f"engine up after {time.time() - began:.0f} s", flush=True)
    if lora:
        _load_adapter(engine, MODELS[options.model], options.rank)
    vocabulary = MODELS[options.model]["vocab_size"] - 1000
    outputs: list[Any] = []
    for batch in options.batches:  # fills the prefix cache, compiles what is compiled at first use
        _generate(engine, f"warm{batch}", batch, 24, vocabulary, bool(lora))
    engine.freeze_gc()  # as Harli's launcher does
    for number, point in enumerate(points):
        if time.time() - began > options.seconds:
            break
        outputs.append(_generate(engine, f"p{number}", point.batch, point.steps + SKIP, vocabulary, bool(lora)))
        if number % 10 == 0:
            print(f"{time.time() - began:.0f} s: point {number} of {len(points)}", flush=True)
        _keep(folder, options, points, outputs)  # a point's figures are there once the next one has begun
    _generate(engine, "end", 1, 4, vocabulary, bool(lora))
    record, correct = _keep(folder, options, points, outputs)
    engine.shutdown()
    _print(record["rows"], correct, record["setup"])


def _keep(folder: Path, options: Any, points: list[Point], outputs: list[Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Write what is there so far."""
    lines = (folder / "points.jsonl").read_text().splitlines() if (folder / "points.jsonl").is_file() else []
    measured = [json.loads(line) for line in lines]
    setup = json.loads((folder / "setup.json").read_text())
    correct = _same_tokens(points, outputs)
    record = provenance("sglang", "torch", "transformers", "harli") | {
        "gpu": setup.pop("gpu"), "setup": setup, "points_left_out": len(points) - len(measured),
        "same_tokens": correct, "rows": _rows(options, points, measured),
    }  # fmt: skip
    write(options.name, record)
    _write_gaps(options.name, points, measured)
    if (folder / "profile.json").is_file() and not options.profile:
        write(f"{options.name}_profile", json.loads((folder / "profile.json").read_text()))
    return record, correct


def _generate(engine: Any, name: str, batch: int, tokens: int, vocabulary: int, adapted: bool) -> list[list[int]]:
    answers = engine.generate(
        input_ids=[[(7919 * i + 31 * j) % vocabulary + 5 for j in range(PROMPT)] for i in range(batch)],
        sampling_params={"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0.0},
        rid=[f"{name}-{i}" for i in range(batch)],
        lora_path=["adapter"] * batch if adapted else None,
    )
    return [answer["output_ids"] for answer in answers]


def adapter_tensors(shape: dict[str, Any], rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Small random factors on every linear layer of a model with such a config, and the adapter's config."""
    import torch

    hidden, width = shape["hidden_size"], shape["intermediate_size"]
    head = shape.get("head_dim") or hidden // shape["num_attention_heads"]
    q, kv = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    sizes = {
        "self_attn.q_proj": (hidden, q), "self_attn.k_proj": (hidden, kv), "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (q, hidden), "mlp.gate_proj": (hidden, width), "mlp.up_proj": (hidden, width),
        "mlp.down_proj": (width, hidden),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        for module, (inputs, outputs) in sizes.items():
            name = f"base_model.model.model.layers.{layer}.{module}.lora_"
            for factor, size in (("A", (rank, inputs)), ("B", (outputs, rank))):
                tensors[f"{name}{factor}.weight"] = (torch.randn(size, generator=generator) * 0.01).bfloat16()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(MODULES), "bias": "none"}
    return tensors, config


def _load_adapter(engine: Any, shape: dict[str, Any], rank: int) -> None:
    # From memory: with load_format dummy SGLang reads no weights from a folder, an adapter's neither.
    tensors, config = adapter_tensors(shape, rank)
    loaded = engine.load_lora_adapter_from_tensors("adapter", tensors, config)
    if not loaded.success:
        raise RuntimeError(f"the adapter was not loaded: {loaded.error_message}")


def _rows(options: Any, points: list[Point], measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    solo: dict[int, list[float]] = {}
    for point, found in zip(points, measured, strict=False):
        if point.mode == "plain":
            solo.setdefault(point.batch, []).extend(found["gaps"])
    rows = []
    for point, found in zip(points, measured, strict=False):
        gaps, alone = sorted(found["gaps"]), sorted(solo[point.batch])
        if not gaps:
            continue
        rows.append(
            {
                "model": options.model, "batch": point.batch, "context": f"{PROMPT}-{PROMPT + point.steps}",
                "attention": options.attention, "lora": options.lora, "policy": point.name,
                "layout": str(point.layout) if point.mode in ("plain", "fixed") else found["layouts"],
                "after": point.after, "target_ms": point.target_ms or None,
                "p50_ms": _quantile(gaps, 0.5), "p99_ms": _quantile(gaps, 0.99), "steps": len(gaps),
                "finetune_tokens_s": round(found["tokens_s"]), "solo_p50_ms": _quantile(alone, 0.5),
                "solo_p99_ms": _quantile(alone, 0.99), "host_us_p50": found["host_us_p50"],
                "beside": found["beside"], "after_mean": found["after"], "reasons": found["reasons"],
                "worst_ms_step": found["worst"], "outlasted": found["outlasted"], "early_ms": found["early_ms"],
            }
        )  # fmt: skip
    return rows


def _write_gaps(name: str, points: list[Point], measured: list[dict[str, Any]]) -> None:
    """Write ``results/<name>_gaps.jsonl``: every gap of the points that are one layout and nothing behind its steps, a
    line each, for benchmarks/frontier_replay.py."""
    lines = [
        {
            "batch": point.batch, "layout": str(point.layout), "busy": point.busy,
            "gaps_ms": [round(gap, 3) for gap in found["gaps"]],
        }
        for point, found in zip(points, measured, strict=False)
        if point.mode == "fixed" and not point.after and found["gaps"]
    ]  # fmt: skip
    if lines:
        (RESULTS / f"{name}_gaps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _quantile(rising: list[float], share: float) -> float:
    return round(rising[min(len(rising) - 1, int(len(rising) * share))], 3)


def _same_tokens(points: list[Point], outputs: list[Any]) -> dict[str, str]:
    """How many requests of each point got the tokens that plain SGLang gave them, as far as both are long."""
    plain: dict[int, Any] = {}
    answer: dict[str, str] = {}
    for point, tokens in zip(points, outputs, strict=False):
        reference = plain.setdefault(point.batch, tokens)
        same = sum(a[: min(len(a), len(b))] == b[: min(len(a), len(b))] for a, b in zip(tokens, reference, strict=True))
        key = f"{point.batch} {point.name} {point.layout} +{point.after}" + (
            f" @{point.target_ms:g}" if point.target_ms else ""
        )
        if key not in answer or same < int(answer[key].split()[0]):
            answer[key] = f"{same} of {len(tokens)}"
    return answer


def _print(rows: list[dict[str, Any]], correct: dict[str, str], setup: dict[str, Any]) -> None:
    print(json.dumps(setup))
    for row in rows:
        print(
            f"bs {row['batch']:>3} {row['policy']:<15} {str(row['layout'])[:46]:<46} +{row['after']:<2} "
            f"target {row['target_ms'] or '-':>4} p50 {row['p50_ms']:6.2f} p99 {row['p99_ms']:6.2f} n {row['steps']:>4}"
            f" {row['finetune_tokens_s']:>6} tok/s host {row['host_us_p50']} us"
        )
    differing = {key: text for key, text in correct.items() if text.split()[0] != text.split()[2]}
    print("tokens differ from plain:", differing or "nowhere")


# ---- the scheduler process -------------------------------------------------------------------------------------------


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """SGLang's scheduler process with the benchmark inside."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    from sglang.srt.managers import scheduler as module

    from benchmarks.frontier_engine import Bench

    _own_lora()

    scheduler = module.Scheduler
    run_loop, run_batch, result, on_idle = (
        scheduler.run_event_loop,
        scheduler.run_batch,
        scheduler.process_batch_result,
        scheduler.on_idle,
    )

    def with_bench(self: Any) -> None:
        self.bench = Bench(self, Path(os.environ[FOLDER]))
        run_loop(self)

    def idle(self: Any) -> None:
        on_idle(self)
        if self.is_fully_idle():
            self.bench.idle()

    scheduler.run_event_loop = with_bench
    scheduler.on_idle = idle
    scheduler.run_batch = lambda self, batch, *a, **k: self.bench.run(batch, lambda: run_batch(self, batch, *a, **k))
    scheduler.process_batch_result = lambda self, batch, *a, **k: self.bench.ended(
        batch, lambda: result(self, batch, *a, **k)
    )
    module.run_scheduler_process(*args, **kwargs)


def _own_lora() -> None:
    """LoRA's kernels as Harli's plugin has them, which is not loaded here, unless SGLang's are asked for."""
    lora = json.loads((Path(os.environ[FOLDER]) / "plan.json").read_bytes())["options"]["lora"]
    if lora != "harli":
        return
    from core.serving import lora_batch, lora_kernels

    for target, hook in (
        (lora_batch.TARGET, lora_batch.prepare_lora_batch),
        (lora_kernels.PRODUCT, lora_kernels.product),
        (lora_kernels.SHRINK, lora_kernels.shrink),
        (lora_kernels.EXPAND, lora_kernels.expand),
    ):
        where, _, name = target.rpartition(".")
        owner = pkgutil.resolve_name(where)
        setattr(owner, name, _around(getattr(owner, name), hook))


def _around(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **named: hook(original, *args, **named)


def point_of(raw: dict[str, Any]) -> Point:
    """A point as the plan file has it."""
    return replace(Point(**raw), layout=Layout(*raw["layout"]))


if __name__ == "__main__":
    main()
