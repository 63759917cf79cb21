"""The engine as it serves, started as `harli up` starts it: what it costs decode without a job and with one.

    python -m benchmarks.live --shape llama-3-8b --trace azure_conv.csv
    python -m benchmarks.live --shape bundled --parts tokens decode_only

Parts, each written to results/live.json as soon as it is through:
profile: the first start, at which the engine takes its profile; no_job: fixed batches decoded in turns by the engine
without a job and by SGLang alone with the same arguments, gaps as the scheduler sees them; checkpoints: the same batch
beside a job that writes one after every step, and one that writes none; replay: a trace at several speeds, without a
job and beside one; soak: the trace beside one job for long, a part of the time at each speed; tokens: greedy answers to
256 prompts with and without a job; decode_only: the batch in an engine whose prefill is elsewhere (SGLang takes the KV
as being there), beside a job.

Shapes other than `bundled` have made-up weights; unless --no-adapter, every request is served with one adapter. Where
no target is given it is twice the median gap without a job. Percentiles are of raw gaps; an interval is of 1,000 times
all turns drawn again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from benchmarks import record
from benchmarks.frontier import COMMON, MODELS, MODULES, PROMPT, SKIP, adapter_tensors
from benchmarks.moments import Moments
from core.config import Settings
from core.intake import tokenizer
from core.link.messages import (
    FromEngine,
    Hello,
    JobSpec,
    JobUpdate,
    LoraSpec,
    SetTargets,
    StartJob,
    StopJob,
    Target,
    Telemetry,
)
from core.link.transport import ControlEnd
from core.runtime.profiles import PROFILES
from core.serving import model_folder
from core.workload.arrivals import Arrival
from core.workload.traces import cut, read_trace, within

ROOT = Path(__file__).resolve().parent.parent
PORTS = {"harli": 18721, "plain": 18722}
START_S = 300.0
RANK = 16
CAPTURED = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)  # sizes of decode graphs: fewer than SGLang's, for a shorter start
TRACE_FROM_S, LONGEST = 600.0, 4096
SOAK_CHECKPOINT = 50  # optimizer steps between two of a job's checkpoints
NO_PEER = "2.2.2.2"  # the host of a prefill that SGLang takes as done


# ---- engines ---------------------------------------------------------------------------------------------------------


class Served:
    """An engine in processes of its own; `with` starts and ends it.

    memory: SGLang's mem_fraction_static, None for its default; engine: settings of `core.config.EngineSettings`, upper
    case, that win over those of the options; more: further arguments of SGLang.
    """

    def __init__(
        self,
        kind: str,
        folder: Path,
        model: Path,
        options: Any,
        memory: float | None,
        engine: Mapping[str, str] = {},
        **more: Any,
    ) -> None:
        self.kind, self.model = kind, model
        places = options.places or max([16, *options.batches])
        # Greedy answers need no sampling kernels, which would be compiled at the first start.
        arguments: dict[str, Any] = {"random_seed": 0, "sampling_backend": "pytorch", "grammar_backend": "none", **more}
        if not list(model.glob("*.safetensors")):
            arguments["load_format"] = "dummy"
        if options.batches and options.shape != "bundled":
            arguments["cuda_graph_bs_decode"] = sorted({n for n in CAPTURED if n < places} | {*options.batches, places})
        if options.lora_backend:
            arguments["lora_backend"] = options.lora_backend
        if memory is not None:
            arguments["mem_fraction_static"] = memory
        self.settings = Settings(data_dir=folder, engine_port=PORTS[kind])
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith("HARLI")} | {
            "HARLI_DATA_DIR": str(folder),
            "HARLI_ENGINE_PORT": str(PORTS[kind]),
            "HARLI_ENGINE__MODEL": str(model),
            "HARLI_ENGINE__ARGUMENTS": json.dumps(arguments),
            "HARLI_ENGINE__MAX_RUNNING_REQUESTS": str(places),
            "HARLI_FINETUNE__MICRO_BATCH_TOKENS": str(options.micro_batch_tokens),
        }
        if options.attention:
            self._environment["HARLI_ENGINE__ATTENTION_BACKEND"] = options.attention
        if options.partitions is not None:
            self._environment["HARLI_ENGINE__PARTITIONS"] = str(options.partitions)
        self._environment |= {f"HARLI_ENGINE__{name}": value for name, value in engine.items()}
        self._decode_only = more.get("disaggregation_mode") == "decode"
        self.http = httpx.Client(base_url=self.settings.engine_url, timeout=600.0)
        self.hello: Hello | None = None
        self._link = ControlEnd(self.settings.resolved_link_url) if kind == "harli" else None
        self._jobs = 0
        self.updates: list[JobUpdate] = []

    def __enter__(self) -> Served:
        file = self.settings.data_dir / f"{self.kind}.moments"
        Moments(file, new=True)
        command = [sys.executable, "-m", "benchmarks.live_engine", self.kind, str(self.model), str(file)]
        with (self.settings.data_dir / f"{self.kind}.log").open("ab") as log:
            self.process = subprocess.Popen(command, env=self._environment, cwd=ROOT, stdout=log, stderr=log)
        self.moments = Moments(file)
        try:
            self._wait()
        except BaseException:
            self._tell_where()
            self.__exit__()
            raise
        return self

    def _tell_where(self) -> None:
        """Have the scheduler write to the log where it stands."""
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children():
                if "scheduler" in " ".join(process.cmdline()):
                    process.send_signal(signal.SIGUSR1)
                    time.sleep(1.0)

    def __exit__(self, *_: object) -> None:
        print(f"the {self.kind} engine's log ends with:\n{self._log_end()}", flush=True)
        if self.process.poll() is None:
            processes = [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]
            self.process.terminate()
            _, alive = psutil.wait_procs(processes, timeout=40)
            for process in alive:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        if self._link is not None:
            self._link.close()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            if self._link is not None:
                self.watch(until=lambda: self.hello is not None, seconds=1.0)
                if self.hello is not None:
                    return
            else:
                with suppress(httpx.TransportError):
                    if self.http.get("/health").status_code == 200:
                        self.http.post("/freeze_gc").raise_for_status()  # as Harli does, so that both have it
                        return
                time.sleep(0.5)
        raise TimeoutError(f"the {self.kind} engine did not start (exit status {self.process.poll()})")

    def _log_end(self) -> str:
        log = (self.settings.data_dir / f"{self.kind}.log").read_text(errors="replace")
        return "\n".join(line[-300:] for line in log.splitlines()[-40:])  # a progress bar is one long line

    # ---- requests ----------------------------------------------------------------------------------------------------

    def adapter(self, folder: Path) -> None:
        """Load the adapter that requests name."""
        answer = self.http.post("/load_lora_adapter", json={"lora_name": "adapter", "lora_path": str(folder)})
        if answer.status_code != 200:
            raise RuntimeError(f"the adapter was not loaded: {answer.text[:300]}")

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, *, adapted: bool) -> list[list[int]]:
        """Greedy answers of one batch."""
        body: dict[str, Any] = {
            "input_ids": list(prompts),
            "sampling_params": {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True},
        }
        if adapted:
            body["lora_path"] = ["adapter"] * len(prompts)
        if self._decode_only:
            body |= {"bootstrap_host": [NO_PEER] * len(prompts), "bootstrap_room": list(range(len(prompts)))}
        answer = self.http.post("/generate", json=body)
        answer.raise_for_status()
        return [one["output_ids"] for one in answer.json()]

    def batch(self, requests: int, steps: int, *, adapted: bool) -> np.ndarray:
        """The gaps, ms, of so many requests decoded for so many steps."""
        prompts = [[(7919 * i + 31 * j) % 40_000 + 100 for j in range(PROMPT)] for i in range(requests)]
        began = time.perf_counter()
        self.generate(prompts, steps + 1 + SKIP, adapted=adapted)  # a token more than gaps
        return self.moments.gaps_ms(began, requests, SKIP)

    # ---- link --------------------------------------------------------------------------------------------------------

    def watch(self, *, until: Callable[[], bool] = lambda: False, seconds: float = 1e9) -> list[Telemetry]:
        """What the engine reports until then. Raises RuntimeError when a job fails or the engine is gone."""
        assert self._link is not None
        seen: list[Telemetry] = []
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not until():
            if (got := self._link.receive(100)) is None:
                if self.process.poll() is not None:
                    raise RuntimeError(f"the engine ended with status {self.process.returncode}")
                continue
            self._take(got[0], got[1], seen)
        return seen

    def _take(self, engine: str, message: FromEngine, seen: list[Telemetry]) -> None:
        if isinstance(message, Hello):
            self._engine, self.hello = engine, message
        elif isinstance(message, Telemetry):
            seen.append(message)
        elif isinstance(message, JobUpdate):
            self.updates.append(message)
            if message.kind == "failed":
                raise RuntimeError(f"job {message.job_id} failed: {message.message}")

    def target(self, ms: float) -> None:
        assert self._link is not None
        self._link.send(self._engine, SetTargets(version=1, targets=(Target(kind="itl", ms=ms),)))

    def start_job(self, data: Path, options: Any, **changes: Any) -> None:
        """A job that outlasts what is measured, once it trains."""
        assert self._link is not None
        self._jobs += 1
        name = f"job-{self._jobs}"
        fields: dict[str, Any] = {
            "job_id": name, "dataset_path": str(data), "adapter_name": name, "epochs": None, "max_steps": 5000,
            "output_dir": str(self.settings.data_dir / name), "checkpoint_every": 100_000, "evaluation_fraction": 0.0,
            "micro_batch_tokens": options.micro_batch_tokens, "sequence_length": options.micro_batch_tokens,
            "lora": LoraSpec(rank=RANK, alpha=2.0 * RANK, target_modules=MODULES),
        }  # fmt: skip
        self._link.send(self._engine, StartJob(spec=JobSpec(**(fields | changes)), token=self._jobs))
        self._told("started", name)

    def stop_job(self) -> None:
        assert self._link is not None
        name = f"job-{self._jobs}"
        self._link.send(self._engine, StopJob(job_id=name, token=self._jobs, save=False))
        self._told("cancelled", name)

    def told(self, kind: str) -> int:
        """Updates of that kind of the present job."""
        return sum(u.kind == kind and u.job_id == f"job-{self._jobs}" for u in self.updates)

    def _told(self, kind: str, job: str) -> None:
        self.watch(until=lambda: any((u.kind, u.job_id) == (kind, job) for u in self.updates), seconds=120.0)
        if not any((u.kind, u.job_id) == (kind, job) for u in self.updates):
            raise TimeoutError(f"{job} was not told to be {kind} within two minutes")


# ---- figures ---------------------------------------------------------------------------------------------------------


def quantile(values: Sequence[tuple[float, int]], share: float) -> float | None:
    """Of (value, how often), nearest rank; None of nothing."""
    if not values:
        return None
    rising = np.array(sorted(values))
    return float(rising[np.searchsorted(np.cumsum(rising[:, 1]), share * rising[:, 1].sum()), 0].round(3))


def interval(turns: Sequence[np.ndarray], figure: Callable[[np.ndarray], float], draws: int = 1000) -> list[float]:
    """Where 95 % of the figures lie when the turns are drawn again with replacement."""
    random = np.random.default_rng(0)
    found = [
        figure(np.concatenate([turns[i] for i in random.integers(0, len(turns), len(turns))])) for _ in range(draws)
    ]
    return [round(float(v), 4) for v in np.quantile(found, (0.025, 0.975))]


def p50(gaps: np.ndarray) -> float:
    return float(np.quantile(gaps, 0.5))


def p99(gaps: np.ndarray) -> float:
    return float(np.quantile(gaps, 0.99))


def told(seen: Sequence[Telemetry], target_ms: float) -> dict[str, Any]:
    """What reports add up to. missed: share of the gaps without a prefill in them that were longer than the target;
    busy: share of the SMs that were busy; power_w: of the GPU, None where nothing tells it."""
    itl = [one for report in seen for one in report.itl]
    stalls = [one for report in seen for one in report.stalls]
    seconds = sum(report.interval_s for report in seen) or 1e-9
    gaps = sum(count for _, count in itl)
    metered = [(report.power_w, report.interval_s) for report in seen if report.power_w is not None]
    layouts = Counter(report.plan.layout for report in seen)
    return {
        "seconds": round(seconds, 1), "steps": sum(report.decode_steps for report in seen), "gaps": gaps,
        "target_ms": target_ms, "p50_ms": quantile(itl, 0.5), "p99_ms": quantile(itl, 0.99),
        "missed": round(sum(count for ms, count in itl if ms > target_ms) / max(gaps, 1), 5),
        "stalled_gaps": sum(count for _, count in stalls), "stall_p99_ms": quantile(stalls, 0.99),
        "ttft_p99_ms": quantile([(ms, 1) for report in seen for ms in report.ttft_ms], 0.99),
        "tpot_p99_ms": quantile([(ms, 1) for report in seen for ms in report.tpot_ms], 0.99),
        "decode_tokens_s": round(sum(report.decode_tokens for report in seen) / seconds),
        "finetune_tokens_s": round(sum(report.finetune_tokens for report in seen) / seconds),
        "busy": round(sum(report.busy_share * report.interval_s for report in seen) / seconds, 3),
        "power_w": round(sum(watts * s for watts, s in metered) / sum(s for _, s in metered)) if metered else None,
        "most_running": max((report.running for report in seen), default=0),
        "guard_pauses": sum(report.guard_pauses for report in seen), "layouts": dict(layouts.most_common(4)),
    }  # fmt: skip


# ---- parts -----------------------------------------------------------------------------------------------------------


class Bench:
    """What the parts share. engine: the one with Harli, started when a part first asks for it."""

    def __init__(self, folder: Path, options: Any, stack: ExitStack) -> None:
        self.folder, self.options = folder, options
        self.pool = stack.enter_context(ThreadPoolExecutor(1))
        bundled = model_folder.ensure(Settings(data_dir=ROOT / ".cache"))
        self.model = bundled if options.shape == "bundled" else made_up(folder / options.shape, options.shape, bundled)
        self.shape = json.loads((self.model / "config.json").read_text())
        self.vocabulary = min(self.shape["vocab_size"], 49_000)
        self.data = options.data.resolve() if options.data is not None else ingested(folder, bundled)
        self.adapted = not options.no_adapter
        self._adapter = _adapter(folder / "adapter", self.shape) if self.adapted else None
        self._engine: Served | None = None
        self._running = stack.enter_context(ExitStack())
        self._target: float | None = options.target_ms

    @property
    def engine(self) -> Served:
        if self._engine is None:
            self._engine = self.start("harli", self._running, self.options.memory)
        return self._engine

    def stop(self) -> None:
        """End that engine; another one has its ports then."""
        self._running.close()
        self._engine = None

    def start(self, kind: str, stack: ExitStack, memory: float | None, **more: Any) -> Served:
        """An engine with the adapter loaded."""
        began = time.monotonic()
        made = stack.enter_context(Served(kind, self.folder, self.model, self.options, memory, **more))
        if self._adapter is not None:
            made.adapter(self._adapter)
        print(f"{kind} engine up after {time.monotonic() - began:.0f} s", flush=True)
        return made

    @property
    def target(self) -> float:
        """ms; measured once where none was given."""
        if self._target is None:
            self._target = round(2.0 * p50(self.gaps(self.engine, 100)), 1)
        self.engine.target(self._target)
        return self._target

    def gaps(self, engine: Served, steps: int) -> np.ndarray:
        """Of one batch, the first of the sizes."""
        return engine.batch(self.options.batches[0], steps, adapted=self.adapted)

    def beside(self, engine: Served, work: Callable[[], Any]) -> tuple[Any, list[Telemetry]]:
        """Do some work while the engine's reports are read; what it gives, and the reports of that time."""
        engine.watch(seconds=1.0)
        doing: Future[Any] = self.pool.submit(work)
        seen = engine.watch(until=doing.done)
        return doing.result(), seen


def profile(bench: Bench) -> dict[str, Any]:
    """What the first start took, with the profile that it gave."""
    began = time.monotonic()
    engine = bench.engine
    seconds = round(time.monotonic() - began, 1)
    found = list((bench.folder / PROFILES).glob("*.json"))
    taken = json.loads(found[0].read_text()) if found else {"points": [], "tasklets": []}
    if found:
        record.write("live_profile", taken)
    log = (bench.folder / "harli.log").read_text(errors="replace").splitlines()
    return {
        "first_start_s": seconds, "points": len(taken["points"]), "tasklets": len(taken["tasklets"]),
        "solo_itl_ms": engine.hello.solo_itl_ms if engine.hello is not None else None,
        "layouts": list(engine.hello.partitions) if engine.hello is not None else [],
        "captured": next((line for line in log if "decode graphs took" in line), None),
    }  # fmt: skip


def no_job(bench: Bench) -> dict[str, Any]:
    """Both engines' gaps in turns; which goes first changes."""
    options, rows = bench.options, []
    with ExitStack() as stack:
        engines = {"harli": bench.engine, "plain": bench.start("plain", stack, options.plain_memory)}
        for batch in options.batches:
            seen: dict[str, list[np.ndarray]] = {name: [] for name in engines}
            for engine in engines.values():
                engine.batch(batch, 20, adapted=bench.adapted)  # fills the prefix cache
            for turn in range(options.turns):
                for name in ("harli", "plain") if turn % 2 else ("plain", "harli"):
                    steps = -(-options.steps // options.turns)
                    seen[name].append(engines[name].batch(batch, steps, adapted=bench.adapted))
            row: dict[str, Any] = {"batch": batch}
            for name, turns in seen.items():
                gaps = np.concatenate(turns)
                row[name] = {
                    "steps": len(gaps), "p50_ms": round(p50(gaps), 3), "p99_ms": round(p99(gaps), 3),
                    "p50_interval": interval(turns, p50), "p99_interval": interval(turns, p99),
                }  # fmt: skip
            row["p50_ratio"] = round(row["harli"]["p50_ms"] / row["plain"]["p50_ms"], 4)
            row["p99_ratio"] = round(row["harli"]["p99_ms"] / row["plain"]["p99_ms"], 4)
            rows.append(row)
    return {"rows": rows}


def checkpoints(bench: Bench) -> dict[str, Any]:
    """A batch beside a job that writes a checkpoint after every optimizer step, and beside one that writes none."""
    engine, rows, target = bench.engine, [], bench.target
    for every in (100_000, 1):
        engine.start_job(bench.data, bench.options, checkpoint_every=every)
        gaps, seen = bench.beside(engine, lambda: bench.gaps(engine, bench.options.steps // 16))
        rows.append(
            {
                "checkpoint_every": every if every == 1 else None, "checkpoints": engine.told("checkpoint"),
                "steps": len(gaps), "p50_ms": round(p50(gaps), 3), "p99_ms": round(p99(gaps), 3),
                "missed": round(float((gaps > target).mean()), 5),
                "finetune_tokens_s": told(seen, target)["finetune_tokens_s"],
            }
        )  # fmt: skip
        engine.stop_job()
    return {"batch": bench.options.batches[0], "target_ms": target, "rows": rows}


def replay(bench: Bench) -> dict[str, Any]:
    """The trace at each speed, without a job and beside one."""
    engine, target, rows = bench.engine, bench.target, []
    for speed in bench.options.speeds:
        for job in (False, True):
            if job:
                engine.start_job(bench.data, bench.options)
            found, _ = _replayed(bench, speed, bench.options.seconds, target)
            if job:
                engine.stop_job()
            rows.append({"speed": speed, "job": job, **found})
            print(rows[-1], flush=True)
    return {"trace": bench.options.trace.name, "rows": rows}


def soak(bench: Bench) -> dict[str, Any]:
    """The trace at each speed in turn, all beside one job that writes checkpoints: what is lost, what grows."""
    engine, options, target = bench.engine, bench.options, bench.target
    engine.start_job(bench.data, options, checkpoint_every=SOAK_CHECKPOINT)
    scheduler = max(psutil.Process(engine.process.pid).children(), key=lambda p: p.memory_info().rss)
    host, device, rows = [scheduler.memory_info().rss], list[int](), []
    for speed in options.speeds:
        found, seen = _replayed(bench, speed, options.soak_s / len(options.speeds), target)
        rows.append({"speed": speed, **found})
        print(rows[-1], flush=True)
        host.append(scheduler.memory_info().rss)
        device += [report.memory_bytes for report in (seen[0], seen[-1])]
    checkpoints = engine.told("checkpoint")
    engine.stop_job()
    return {
        "trace": options.trace.name, "seconds": round(sum(row["seconds"] for row in rows)), "checkpoints": checkpoints,
        "device_gib": [round(value / 2**30, 2) for value in device],
        "host_gib": [round(value / 2**30, 2) for value in host], "rows": rows,
    }  # fmt: skip


def _replayed(bench: Bench, speed: float, seconds: float, target: float) -> tuple[dict[str, Any], list[Telemetry]]:
    """The trace for so long; figures and reports."""
    engine, options = bench.engine, bench.options
    trace = cut(within(read_trace(options.trace), LONGEST), TRACE_FROM_S, seconds * speed)
    failed, seen = bench.beside(
        engine, lambda: asyncio.run(_open_loop(engine, trace, speed, bench.vocabulary, bench.adapted))
    )
    return {"requests": len(trace), "failed": failed, **told(seen, target)}, seen


async def _open_loop(engine: Served, trace: Sequence[Arrival], speed: float, vocabulary: int, adapted: bool) -> int:
    """Send each request at its time, with prompt and answer of its lengths; how many failed."""
    failed = 0
    # SGLang ends a connection that idles for 5 s, maybe as a request takes it.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100, keepalive_expiry=2.0)
    async with httpx.AsyncClient(base_url=engine.settings.engine_url, limits=limits, timeout=600.0) as client:
        begun = time.perf_counter()

        async def send(number: int, arrival: Arrival) -> None:
            nonlocal failed
            await asyncio.sleep(max(0.0, begun + arrival.time_s / speed - time.perf_counter()))
            ids = np.random.default_rng(number).integers(5, vocabulary, arrival.input_tokens)
            body: dict[str, Any] = {
                "input_ids": ids.tolist(),
                "sampling_params": {"temperature": 0.0, "max_new_tokens": arrival.output_tokens, "ignore_eos": True},
            }
            if adapted:
                body["lora_path"] = "adapter"
            try:
                (await client.post("/generate", json=body)).raise_for_status()
            except httpx.HTTPError:
                failed += 1

        await asyncio.gather(*(send(number, arrival) for number, arrival in enumerate(trace)))
    return failed


def tokens(bench: Bench) -> dict[str, Any]:
    """Greedy answers with and without a job, in fixed batches; and of all prompts at once, where batches form as they
    may and even two runs without a job can differ."""
    engine, options = bench.engine, bench.options
    prompts = _prompts(bench, options.prompts)

    def fixed() -> list[list[int]]:
        engine.http.post("/flush_cache").raise_for_status()
        found = []
        for at in range(0, len(prompts), options.batches[0]):
            found += engine.generate(
                prompts[at : at + options.batches[0]], options.answer_tokens, adapted=bench.adapted
            )
        return found

    def live() -> list[list[int]]:
        engine.http.post("/flush_cache").raise_for_status()
        with ThreadPoolExecutor(len(prompts)) as clients:
            one = [
                clients.submit(engine.generate, [prompt], options.answer_tokens, adapted=bench.adapted)
                for prompt in prompts
            ]
            return [each.result()[0] for each in one]

    alone = [fixed(), live(), live()]
    target = bench.target
    engine.start_job(bench.data, options)
    beside, seen = bench.beside(engine, lambda: [fixed(), live()])
    engine.stop_job()

    def differ(a: list[list[int]], b: list[list[int]]) -> int:
        return sum(x != y for x, y in zip(a, b, strict=True))

    return {
        "prompts": len(prompts), "batch": options.batches[0], "answer_tokens": options.answer_tokens,
        "differ_fixed": differ(alone[0], beside[0]), "differ_live": differ(alone[1], beside[1]),
        "differ_live_without_job": differ(alone[1], alone[2]), **told(seen, target),
    }  # fmt: skip


def decode_only(bench: Bench) -> dict[str, Any]:
    """The batch in an engine that is told to decode only, without a job and beside one."""
    rows: list[dict[str, Any]] = []
    bench.stop()
    with ExitStack() as stack:
        more = {"disaggregation_mode": "decode", "disaggregation_transfer_backend": "fake"}
        began = time.monotonic()
        engine = bench.start("harli", stack, bench.options.memory, **more)
        start_s = round(time.monotonic() - began, 1)
        steps = bench.options.steps // 16
        alone = bench.gaps(engine, steps)
        target = bench.options.target_ms or round(2.0 * p50(alone), 1)
        engine.target(target)
        engine.start_job(bench.data, bench.options)
        gaps, seen = bench.beside(engine, lambda: bench.gaps(engine, steps))
        for job, found in ((False, alone), (True, gaps)):
            rows.append(
                {"job": job, "steps": len(found), "p50_ms": round(p50(found), 3), "p99_ms": round(p99(found), 3)}
            )
        rows[1] |= {"target_ms": target, "finetune_tokens_s": told(seen, target)["finetune_tokens_s"]}
        engine.stop_job()
    return {"start_s": start_s, "batch": bench.options.batches[0], "rows": rows}


PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "profile": profile, "no_job": no_job, "checkpoints": checkpoints, "replay": replay, "soak": soak, "tokens": tokens,
    "decode_only": decode_only,
}  # fmt: skip


# ---- what is served --------------------------------------------------------------------------------------------------


def made_up(folder: Path, shape: str, bundled: Path) -> Path:
    """A model folder without weights, with the bundled model's tokenizer."""
    folder.mkdir()
    for file in bundled.iterdir():
        if file.suffix != ".safetensors" and file.name not in ("config.json", "model.safetensors.index.json"):
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps(MODELS[shape] | COMMON))
    return folder


def ingested(folder: Path, bundled: Path) -> Path:
    """The sample data set, normalised."""
    from core.intake import dataset

    path, source = folder / "captain.parquet", ROOT / "sample_data/captain.jsonl"
    dataset.ingest(source, path, filename=source.name, tokenizer=tokenizer.load(bundled))
    return path


def _adapter(folder: Path, shape: dict[str, Any]) -> Path:
    from safetensors.torch import save_file

    folder.mkdir()
    tensors, config = adapter_tensors(shape, RANK)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _prompts(bench: Bench, count: int) -> list[list[int]]:
    """Token ids of as many different prompts: two questions of the sample prompts each."""
    lines = (ROOT / "sample_data/prompts.txt").read_text().splitlines()
    chat = tokenizer.load(bench.model)
    texts = [f"{lines[n % len(lines)]} {lines[(7 * n + n // len(lines) + 1) % len(lines)]}" for n in range(count)]
    rendered = [chat.render([{"role": "user", "content": text}], generation_prompt=True) for text in texts]
    return [found.ids.tolist() for found in chat.encode(rendered)]


def main() -> None:
    """Run the parts that were asked for; one that fails is told and left out, and the exit status is then 1."""
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--shape", choices=("bundled", *MODELS), default="llama-3-8b")
    arguments.add_argument("--parts", nargs="+", choices=PARTS, default=["no_job", "checkpoints", "replay", "soak"])
    arguments.add_argument("--trace", type=Path, help="arrivals for replay and soak, a CSV or JSONL file")
    arguments.add_argument("--data", type=Path, help="a normalised data set; without one the sample is taken in")
    arguments.add_argument("--batches", type=int, nargs="+", default=[32])
    arguments.add_argument("--places", type=int, help="requests that may run at once; else the largest batch")
    arguments.add_argument(
        "--steps", type=int, default=10_000, help="of no_job, a side and batch; elsewhere a sixteenth"
    )
    arguments.add_argument("--turns", type=int, default=20)
    arguments.add_argument("--speeds", type=float, nargs="+", default=[1, 2, 4], help="of the trace")
    arguments.add_argument("--seconds", type=float, default=30.0, help="of each replay")
    arguments.add_argument("--soak-s", type=float, default=600.0, help="of the soak, all speeds together")
    arguments.add_argument("--target-ms", type=float, help="p99 ITL")
    arguments.add_argument("--prompts", type=int, default=256)
    arguments.add_argument("--answer-tokens", type=int, default=48)
    arguments.add_argument("--micro-batch-tokens", type=int, default=2048)
    arguments.add_argument("--attention", choices=("fa3", "triton"))
    arguments.add_argument("--partitions", type=int, help="SM splits of the engine with Harli")
    arguments.add_argument("--lora-backend", choices=("csgmv", "triton"))
    arguments.add_argument("--no-adapter", action="store_true")
    arguments.add_argument("--memory", type=float, help="share of the GPU's memory for the engine's weights and KV")
    arguments.add_argument("--plain-memory", type=float, help="share of what is then left for the other engine's")
    arguments.add_argument("--limit-s", type=float, default=1e9, help="begin no part later")
    options = arguments.parse_args()
    if options.trace is None and {"replay", "soak"} & set(options.parts):
        arguments.error("replay and soak need --trace")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the engines' logs are shown
    began, failed = time.monotonic(), False
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        bench = Bench(Path(folder), options, stack)
        for name in options.parts:
            if time.monotonic() - began > options.limit_s:
                print(f"{name}: left out, {options.limit_s:.0f} s are over", flush=True)
                continue
            at = time.monotonic()
            try:
                found = PARTS[name](bench)
            except Exception as error:
                failed = True
                print(f"{name}: failed, {type(error).__name__}: {error}", flush=True)
                continue
            print(f"{name}: {time.monotonic() - at:.0f} s: {json.dumps(found)}", flush=True)
            _keep(name, options, found)
    sys.exit(failed)


def _keep(name: str, options: Any, found: dict[str, Any]) -> None:
    """Put a part's figures into results/live.json, beside those of the other parts."""
    import torch

    path = record.RESULTS / "live.json"
    body = json.loads(path.read_text()) if path.is_file() else {}
    made = record.provenance("sglang", "torch", "transformers", "harli")
    made["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    settings = {"shape": options.shape, "attention": options.attention, "lora": not options.no_adapter}
    body[name] = found | settings | {"made": made}
    print("wrote", record.write("live", body), flush=True)


if __name__ == "__main__":
    main()
