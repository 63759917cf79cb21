"""The part of the frontier benchmark that runs inside SGLang's scheduler process: partitions, graphs, executor, points.

It drives the executor as the runtime does, with a plan of its own at fixed points and a policy's at the others.
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import msgspec
import torch

from benchmarks.frontier import MODELS, PROMPT, SKIP, Point, adapter_tensors, point_of
from core.finetune.random_work import RandomWork
from core.partition import green
from core.policy import bind
from core.policy.types import WHOLE, JobView, Layout, StepPlan, StepState, TaskletKind
from core.predictor.profile import Machine, Profile, TaskletPoint
from core.predictor.profile import Point as StepPoint
from core.predictor.two_stage import TwoStagePredictor
from core.runtime.executor import Executor, Expected, Ran, Size
from core.runtime.predicted import Predicted
from core.serving.layouts import DecodeLayouts

_AHEAD = 64
_IDLE, _IDLE_MS = 8, 8.0  # while nothing decodes: tasklets that are queued at once, when less than that is queued
_FIGURE = re.compile(r"\d+(\.\d+)?")
_MS_CYCLES = 1_900_000  # of an H200's clock, about a millisecond


def feed_of(model: Any, model_path: Path, partitions: Any, options: dict[str, Any]) -> RandomWork:
    """Endless random micro-batches; what they trained is counted by `Bench.tokens`."""
    from core.finetune.captured import CapturedTrainer, Slot
    from core.finetune.fused import FusedWeights
    from core.finetune.views import shared_model

    weights = FusedWeights.of(model, shared_model(model, model_path))
    streams = list(dict.fromkeys(part.finetune for part in partitions.parts))
    trainer = CapturedTrainer(weights, Slot(options["rank"], options["micro_batch_tokens"]), streams)
    places = {part.layout: streams.index(part.finetune) for part in partitions.parts}
    return RandomWork(trainer, places, weights.shape.vocabulary, _fresh_lora(options["model"], options["rank"]))


class Bench:
    """One engine's points, told apart by the ids of the running requests."""

    def __init__(self, scheduler: Any, folder: Path) -> None:
        plan = msgspec.json.decode((folder / "plan.json").read_bytes())
        options = plan["options"]
        self._folder = folder
        self.points = [point_of(raw) for raw in plan["points"]]
        began = time.perf_counter()
        device = torch.device("cuda", torch.cuda.current_device())
        self.partitions = green.make(device, 0, options["splits"])
        free = torch.cuda.mem_get_info()[0]
        self.layouts = DecodeLayouts(scheduler.tp_worker.model_runner, self.partitions)
        captured = time.perf_counter()
        decode_gib = (free - torch.cuda.mem_get_info()[0]) / 2**30
        free = torch.cuda.mem_get_info()[0]
        with torch.inference_mode(False), torch.enable_grad():
            model = scheduler.tp_worker.model_runner.model
            self.feed = feed_of(model, folder / "model", self.partitions, options)
        self._kind_ms: dict[tuple[Layout, TaskletKind], float] = {}
        self._random = Random(0)
        self.stream = scheduler.forward_stream
        self._kv_heads = scheduler.tp_worker.model_runner.model.config.num_key_value_heads
        self.executor = Executor(
            self.stream,
            {part.layout: part.finetune for part in self.partitions.parts},
            select=self.layouts.select,
            new_event=lambda: torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
            expectation=self,
        )
        done = time.perf_counter()
        self.setup: dict[str, Any] = {
            "layouts": [str(layout) for layout in self.partitions.layouts],
            "decode_graphs_s": round(captured - began, 1), "decode_graphs_gib": round(decode_gib, 2),
            "tasklet_graphs_s": round(done - captured, 1),
            "tasklet_graphs_gib": round((free - torch.cuda.mem_get_info()[0]) / 2**30, 2),
        }  # fmt: skip
        self.number: int | None = None
        self._tasklet_points = self._alone()
        self.records: dict[int, dict[str, Any]] = {}
        self._last: tuple[int, float] | None = None
        self._policy: Any = None
        self._memory: Any = None
        self._predictor: Any = None
        self._predicted = Predicted(lambda: self._predictor)
        self._plan = StepPlan()
        self._expected = 6.0

    def decode_ms(self, layout: Layout, size: Size, beside: TaskletKind | None) -> float:
        """The executor's `Expectation`: what the engine's own runtime expects where a policy plans, else what the last
        step took."""
        if self._plans:
            return self._predicted.decode_ms(layout, size, beside)
        return self._expected

    def tasklet_ms(self, layout: Layout, kind: TaskletKind, size: Size) -> Expected:
        """Likewise, else what tasklets took lately."""
        if self._plans:
            return self._predicted.tasklet_ms(layout, kind, size)
        ms = self._kind_ms.get((layout, kind), 2.0)
        return Expected(ms, ms)

    @property
    def _plans(self) -> bool:
        """A policy plans the present point."""
        return self.number is not None and self.points[self.number].mode == "policy"

    # ---- tasklets alone ----------------------------------------------------------------------------------------------

    def _alone(self) -> list[TaskletPoint]:
        """Time one micro-batch alone on every finetune part, and exclusive finetuning on the whole device."""
        points = []
        seen: set[int] = set()
        for part in self.partitions.parts:
            if id(part.finetune) in seen:
                for kind in set(self.feed.kinds):
                    same = next(p for p in self.partitions.parts if p.finetune is part.finetune)
                    self._kind_ms[part.layout, kind] = self._kind_ms[same.layout, kind]
                    points.append(TaskletPoint(layout=part.layout, kind=kind, ms=self._kind_ms[part.layout, kind],
                                               p99_ms=self._kind_ms[part.layout, kind] * 1.05))  # fmt: skip
                continue
            seen.add(id(part.finetune))
            for _ in range(2 if part.layout == WHOLE else 1):
                spent = self._micro_batch_alone(part.layout)
            by_kind: dict[TaskletKind, list[float]] = defaultdict(list)
            for ran in spent:
                by_kind[ran.kind].append(ran.ms)
            for kind, values in by_kind.items():
                self._kind_ms[part.layout, kind] = median(values)
                tail = max(median(values) * 1.05, sorted(values)[int(len(values) * 0.95)])
                points.append(TaskletPoint(layout=part.layout, kind=kind, ms=median(values), p99_ms=tail))
            self.setup[f"micro_batch_ms {part.layout}"] = round(sum(ran.ms for ran in spent), 1)
        whole = {kind: self._kind_ms[WHOLE, kind] for kind in set(self.feed.kinds)}
        total = sum(whole[kind] for kind in self.feed.kinds)
        self.tokens = {kind: self.feed.micro_batch_tokens * ms / total for kind, ms in whole.items()}
        began = time.perf_counter()
        for _ in range(4):
            self._micro_batch_alone(WHOLE)
        self.setup["exclusive_tokens_s"] = round(4 * self.feed.micro_batch_tokens / (time.perf_counter() - began))
        self.setup["kinds_ms"] = {kind: round(ms, 3) for kind, ms in whole.items()}
        self.setup["losses"] = [round(loss, 4) for loss in self.feed.losses()][:3]
        self.setup["prompt_tokens"] = PROMPT
        body = self.setup | {"gpu": torch.cuda.get_device_name()}
        (self._folder / "setup.json").write_bytes(msgspec.json.encode(body))
        return points

    def _micro_batch_alone(self, layout: Layout) -> list[Ran]:
        executor, count, ran = self.executor, len(self.feed.kinds), []
        left = count
        while left:
            left -= executor.idle(min(left, 8), self.feed, layout)
            ran += executor.collect()[1]
        executor.drain()
        return ran + executor.collect()[1]

    # ---- step path ---------------------------------------------------------------------------------------------------

    def run(self, batch: Any, launch: Callable[[], Any]) -> Any:
        """The scheduler launches a batch."""
        if not batch.forward_mode.is_decode():
            self.executor.other_batch()
            return launch()
        rid = batch.reqs[0].rid
        number = int(rid[1 : rid.index("-")]) if rid[0] == "p" else None
        if number != self.number:
            self._enter(number)
        if number is None or self.points[number].mode == "plain":
            if self.executor.layout != WHOLE:
                self.executor.begin_step(WHOLE, Size(0, 0, 0))
            self.executor.other_batch()
            return launch()
        point = self.points[number]
        if point.mode == "random":
            self._delay(self.stream, torch.cuda.current_stream())
        began = time.perf_counter()
        request = batch.reqs[0]
        tokens = len(request.origin_input_ids) + len(request.output_ids) + 1
        size = Size(self.layouts.padded(len(batch.reqs)), tokens * len(batch.reqs), tokens)
        record = self.records[number]
        self.executor.catch_up()
        plan = self._planned(point, size) if len(batch.reqs) == point.batch else StepPlan(point.layout)
        self.executor.begin_step(plan.layout, size)
        planned = time.perf_counter()
        result = launch()
        if point.mode == "random":
            self._delay(self.partitions.of(plan.layout).finetune, self.partitions.of(WHOLE).finetune)
        launched = time.perf_counter()
        self.executor.step_launched(plan, self.feed)
        record["host"].append(planned - began + time.perf_counter() - launched)
        record["layouts"][str(plan.layout)] += 1
        record["reasons"][_FIGURE.sub("#", plan.reason)] += 1
        return result

    def ended(self, batch: Any, process: Callable[[], Any]) -> Any:
        """The scheduler has a batch's result."""
        answer = process()
        now = time.perf_counter()
        number = self.number
        if not batch.forward_mode.is_decode() or number is None:
            self._last = None
            return answer
        steps, ran = self.executor.collect()
        point, record = self.points[number], self.records[number]
        # Requests of a point end together: that gap holds the handing over of all answers, which traffic spreads.
        first = batch.reqs[0]
        whole = len(batch.reqs) == point.batch and first.rid.startswith(f"p{number}-") and not first.finished()
        if self._last is not None and self._last[0] == number and whole:
            record["seen"] += 1
            if record["seen"] > SKIP:
                record["gaps"].append((now - self._last[1]) * 1e3)
                record["trained"] += sum(self.tokens[one.kind] for one in ran)
                record["ran"] += ran
                record["steps"] += steps
        self._last = (number, now) if whole else None
        for step in steps:
            self._expected = step.ms
            if step.early:
                record["early_ms"].append(round(step.ms, 2))
            elif point.mode == "policy" and step.padded:
                size = step.padded, step.kv_tokens
                bound = self._predictor.decode_upper_ms(step.layout, *size, step.beside, step.max_kv)
                if self._predictor.observe_step(step.layout, *size, step.ms, step.beside, step.max_kv):
                    where = f"{step.layout}, {'beside finetuning' if step.beside else 'alone'}"
                    record["outlasted"][where].append((round(step.ms, 2), round(bound, 2)))
        for one in ran:
            if point.mode == "policy":
                self._predictor.observe_tasklet(one.layout, one.kind, one.ms, one.padded, one.kv_tokens)
            elif point.mode == "fixed" and one.layout != WHOLE:
                mean = self._kind_ms[one.layout, one.kind]
                self._kind_ms[one.layout, one.kind] = mean + 0.1 * (one.ms - mean)
        return answer

    def idle(self) -> None:
        """Nothing decodes: a job goes on, as it does in an engine. A GPU that stood still until the next point would
        drop its clock for some steps about a second after that began, and those would be the point's p99."""
        if self.number is None or not self.points[self.number].trains:
            return
        self.executor.collect()
        if self.executor.queued_ms() < _IDLE_MS:
            self.executor.idle(_IDLE, self.feed)

    def _planned(self, point: Point, size: Size) -> StepPlan:
        executor = self.executor
        if point.mode == "random":
            layout = self._random.choice(self.partitions.layouts)
            return StepPlan(layout, self._random.randrange(4), self._random.randrange(2))
        if point.mode == "fixed":
            beside = 0
            if point.busy:
                # Kept busy: half a step more than covers this one. With tasklets behind the step: what ends with it.
                lacking = (1.0 if point.after else 1.5) * self._expected - executor.beside_ms().mean
                for kind in self.feed.upcoming(_AHEAD):
                    ms = self._kind_ms[point.layout, kind]
                    if lacking < (ms if point.after else 0.0):
                        break
                    lacking -= ms
                    beside += 1
            return StepPlan(point.layout, beside, point.after)
        kinds, left = self.feed.upcoming(_AHEAD), executor.beside_ms()
        state = StepState(
            batch=point.batch, padded=size.padded, kv_tokens=size.kv_tokens, max_kv=size.max_kv, waiting=0,
            prefill_waiting=0, slack_ms=(point.target_ms,), inflight_ms=executor.inflight_ms(),
            jobs=(JobView("job", kinds, tokens_per_tasklet=20.0),), layouts=self._predictor.layouts,
            layout=executor.layout, beside_ms=left.bound, beside_mean_ms=left.mean, target_ms=(point.target_ms,),
        )  # fmt: skip
        plan, self._memory = self._policy.plan(state, self._predictor, self._memory)
        assert isinstance(plan, StepPlan)
        return plan

    def _delay(self, *streams: Any) -> None:
        """Up to a millisecond on each, or none."""
        for stream in streams:
            if self._random.random() < 0.5:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(self._random.randrange(_MS_CYCLES))

    # ---- points ------------------------------------------------------------------------------------------------------

    def _enter(self, number: int | None) -> None:
        self.executor.catch_up()
        self.executor.drain()
        self.executor.collect()
        if self.number is not None:
            record = self.records[self.number]
            record["beside"], record["after"] = self.executor.take_counts()
            self._write(record)
        self.number, self._last = number, None
        if number is None:
            return
        self.records[number] = {
            "gaps": [], "seen": 0, "trained": 0.0, "ran": [], "steps": [], "host": [], "beside": 0, "after": 0,
            "layouts": Counter(), "reasons": Counter(), "outlasted": defaultdict(list),
            "early_ms": [],
        }  # fmt: skip
        point = self.points[number]
        if point.mode == "policy":
            if self._predictor is None:  # one for all, as an engine has: on a fresh one a hiccup weighs most
                given = self._folder / "profile.json"
                made = Profile.model_validate_json(given.read_bytes()) if given.is_file() else self._make_profile()
                self._predictor = TwoStagePredictor(made)
                self._teach(self._predictor)
            self._policy = bind(point.policy)
            self._memory = self._policy.MEMORY

    def _teach(self, predictor: TwoStagePredictor) -> None:
        """Show the predictor the steps and tasklets of the fixed points, one of each point in turn, as an engine that
        has served for a while has seen all its layouts."""
        fixed = [record for number, record in self.records.items() if self.points[number].mode == "fixed"]
        for steps in zip_longest(*(record["steps"] for record in fixed)):
            for step in filter(None, steps):
                if step.padded and not step.early:
                    predictor.observe_step(step.layout, step.padded, step.kv_tokens, step.ms, step.beside, step.max_kv)
        for tasklets in zip_longest(*(record["ran"] for record in fixed)):
            for one in filter(None, tasklets):
                predictor.observe_tasklet(one.layout, one.kind, one.ms, one.padded, one.kv_tokens)

    def _make_profile(self) -> Profile:
        """The fixed points as the profile that the predictor is fitted to."""
        steps: list[StepPoint] = []
        tasklets = list(self._tasklet_points)
        for number, record in self.records.items():
            point = self.points[number]
            if point.mode != "fixed" or point.after or not record["steps"]:
                continue
            half = max(1, len(record["steps"]) // 2)
            for chunk in (record["steps"][:half], record["steps"][half:]):
                if not chunk:
                    continue
                values = sorted(step.ms for step in chunk)
                steps.append(
                    StepPoint(
                        layout=point.layout, batch=point.batch, kv_tokens=max(s.kv_tokens for s in chunk),
                        max_kv=max(s.max_kv for s in chunk), beside="mix" if point.busy else None,
                        ms=median(values), p99_ms=values[int(len(values) * 0.99)],
                    )
                )  # fmt: skip
            by_kind: dict[TaskletKind, list[float]] = defaultdict(list)
            for one in record["ran"]:
                by_kind[one.kind].append(one.ms)
            for kind, values in by_kind.items():
                tasklets.append(
                    TaskletPoint(
                        layout=point.layout, kind=kind, batch=point.batch,
                        kv_tokens=median(s.kv_tokens for s in record["steps"]).__int__(), ms=median(values),
                        p99_ms=max(sorted(values)[int(len(values) * 0.99)], median(values)),
                    )
                )  # fmt: skip
        profile = Profile(
            machine=Machine(
                gpu=torch.cuda.get_device_name(), sms=self.partitions.sms, driver=str(torch.version.cuda),
                model="frontier", engine="sglang 0.5.16", dtype="bfloat16",
            ),
            captured=self.layouts.sizes, kv_heads=self._kv_heads, points=tuple(steps), tasklets=tuple(tasklets),
        )  # fmt: skip
        (self._folder / "profile.json").write_text(profile.model_dump_json())
        return profile

    def _write(self, record: dict[str, Any]) -> None:
        """Add a point's figures to the file, in the order of the points."""
        seconds = sum(record["gaps"]) / 1e3
        point = {
            "gaps": record["gaps"],
            "tokens_s": record["trained"] / seconds if seconds else 0.0,
            "host_us_p50": round(median(record["host"]) * 1e6) if record["host"] else 0,
            "beside": record["beside"], "after": record["after"],
            "layouts": " ".join(f"{layout}:{steps}" for layout, steps in record["layouts"].most_common()),
            "reasons": dict(record["reasons"].most_common(4)),
            "outlasted": {where: [len(found), *sorted(found)[-3:]] for where, found in record["outlasted"].items()},
            "early_ms": record["early_ms"][-2:],
            "worst": sorted(((round(ms, 2), n) for n, ms in enumerate(record["gaps"])), reverse=True)[:3],
        }  # fmt: skip
        with (self._folder / "points.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(point) + b"\n")


def _fresh_lora(model: str, rank: int) -> dict[str, torch.Tensor]:
    """LoRA as peft begins it, by peft's names: A small and random; B, which is left out, zero."""
    tensors, _ = adapter_tensors(MODELS[model], rank)
    return {name.replace("lora_A", "lora_A.default"): value for name, value in tensors.items() if "lora_A" in name}
