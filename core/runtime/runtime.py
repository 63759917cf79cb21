"""The co-location runtime: lives in SGLang's scheduler process, on the scheduler's own thread.

It is told when steps begin and end and when the engine idles, asks the policy how much finetuning fits, runs the
tasklets, and talks to the control plane over the link. It knows nothing of SGLang; `core.serving.attach` does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import torch

from core.finetune.captured_job import CapturedJob
from core.finetune.trainer import Trainer
from core.link.messages import (
    EngineNotice,
    Goodbye,
    Hello,
    JobUpdate,
    Learnt,
    PauseJob,
    SetTargets,
    StartJob,
    StopJob,
    Stopping,
    ToEngine,
)
from core.link.transport import EngineEnd
from core.policy import bind
from core.policy.types import WHOLE, Layout, Predictor, StepPlan, StepState, TaskletKind
from core.predictor.moving import MovingPredictor
from core.predictor.two_stage import TwoStagePredictor
from core.runtime.clock import StepClock
from core.runtime.executor import NO_TIME, Executor, Size
from core.runtime.guard import Guard
from core.runtime.job import JobRun
from core.runtime.limits import Applied, Limits
from core.runtime.memory import Broker
from core.runtime.profiles import Profiling
from core.runtime.profiling import Profiler
from core.runtime.report import Interval
from core.runtime.work import Work

if TYPE_CHECKING:
    from core.runtime.gpu_watch import GpuWatch

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.5
_LEARNT_EVERY_S = 10.0
_CALIBRATION_GAPS = 24
_PUMP_S = 0.0005  # between two looks at a device that is busy with finetuning alone


class Load(NamedTuple):
    """The engine between two steps. kv_*: tokens; prefill_waiting: prompt tokens that wait for prefill; adapters: what
    each running request is served with, None for the base model (empty: all of them)."""

    running: Sequence[str]
    waiting: int
    prefill_waiting: int
    kv_tokens: int
    max_kv: int
    kv_used: int
    kv_total: int
    adapters: Sequence[str | None] = ()


@dataclass(frozen=True, slots=True)
class Queued:
    """A device that works through what is queued, in layouts: its executor; the layouts that exist, each with the place
    of its finetune stream among those that tasklets were captured on; the captured size that a batch is padded to."""

    executor: Executor
    partitions: Mapping[Layout, int]
    padded: Callable[[int], int]


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the runtime needs of the engine: who it is, where finetuning runs, how a job's trainer is built.

    queued: None where tasklets run eagerly between two steps; profiling: None where nothing is profiled, and the
    predictor learns from what it sees; memory: None where KV cache and job have memory of their own; announced: called
    when nothing of the engine's own is decoded or trained any more; gpu: None where there is none.
    """

    hello: Hello
    device: torch.device
    prepare: Callable[[StartJob], Trainer | CapturedJob]
    queued: Queued | None = None
    profiling: Profiling | None = None
    memory: Broker | None = None
    announced: Callable[[], None] = lambda: None
    gpu: GpuWatch | None = None


class Runtime:
    """Glue between the engine's steps, the policy, the job and the link. Single-threaded.

    Requests whose id begins with `calibration_prefix` are the engine's own, sent at start to measure the solo step;
    they count as nobody's latency, and the engine is announced when `finish_calibration` says that they are through.
    `clock` gives monotonic seconds.
    """

    def __init__(
        self,
        engine: Prepared,
        link: EngineEnd,
        *,
        policy: str,
        margin: float,
        calibration_prefix: str,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine = engine
        self._link = link
        self._policy_name = policy
        self._policy = bind(policy)
        self._memory = self._policy.MEMORY
        self._margin = margin
        self._calibration_prefix = calibration_prefix
        self._predictor: Predictor = engine.profiling.predictor if engine.profiling is not None else MovingPredictor()
        self._measured_batch: int | None = None
        self._guard = Guard()
        self._clock = StepClock()
        self._limits = Limits()
        self._targets_version = 0
        self._job: JobRun | None = None
        self._calibration: list[float] | None = []
        self._solo_itl_ms: float | None = None
        self._time = clock
        now = clock()
        self._interval = Interval(now)
        self._step_began = now
        self._last_decode_end: float | None = None
        self._tasklet_s = 0.0  # finetune time since the last decode step ended
        self._load = Load((), 0, 0, 0, 0, 0, 0)
        self._work = Work()
        self._relative: Mapping[TaskletKind, float] = {}
        self._learnt_at = now
        self.closed = False

    @property
    def asks_for_adapters(self) -> bool:
        """Whether `Load.adapters` is needed; an engine that leaves it out when it is not saves its step that much."""
        return self._limits.by_tenant

    # ---- told by the engine ------------------------------------------------------------------------------------------

    def between_batches(self) -> None:
        """No batch is being made. What waits for memory does not wait for the next result too, which of a long prefill
        takes its time, and which never comes where nothing can run before there is memory."""
        if self._engine.memory is not None and self._engine.memory.waited_for:
            self._share_memory(self._engine.memory.look)

    def request_came(self) -> None:
        """A request was queued, while no batch is being made."""
        if self._engine.memory is not None:
            self._share_memory(self._engine.memory.request_came)

    def step_begins(self) -> None:
        """A batch is about to be launched."""
        self._step_began = self._time()
        if self._engine.memory is not None:
            self._engine.memory.batch_made()
        if self._engine.queued is not None:
            self._engine.queued.executor.other_batch()
        if self._profiler is not None:
            self._profiler.other_batch()

    def prefill_begins(self) -> None:
        """A prefill is about to be launched. Beside it, what the KV cache waits for would be over when it is."""
        self._clock.prefill_begins()
        if self._engine.queued is not None and self._engine.memory is not None and self._engine.memory.reclaiming:
            self._engine.queued.executor.finetuning_first()
        self.step_begins()

    def decode_begins(self, load: Load) -> None:
        """A decode batch, `load.running`, is about to be launched on a device that works through a queue: plan for it
        and select its graphs."""
        queued = self._queued
        now = self._step_began = self._time()
        if self._engine.memory is not None:
            self._engine.memory.batch_made()
        self._load = load
        queued.executor.catch_up()  # so that the plan knows of it
        self._step_size = Size(queued.padded(len(load.running)), load.kv_tokens, load.max_kv)
        if self._measures(load):
            return
        self._step_plan = self._plan(now)
        queued.executor.begin_step(self._step_plan.layout, self._step_size)

    def decode_launched(self) -> None:
        """That batch is launched: queue what its plan puts beside and behind it."""
        if self._profiler is not None and self._measured_batch is not None:
            self._profiler.step_launched()
            return
        plan = self._interval.last_plan = self._step_plan
        work = self if self._job is not None and not plan.pause else None
        self._queued.executor.step_launched(plan, work)

    def on(self, layout: Layout) -> AbstractContextManager[None]:
        """What the executor queues several of the job's tasklets within."""
        return self._job.on(self._queued.partitions[layout]) if self._job is not None else nullcontext()

    def launch(self, layout: Layout) -> TaskletKind | None:
        """The executor asks for the job's next tasklet on a layout's finetune stream."""
        job = self._job
        if job is None or job.ended:
            return None
        tokens = job.tokens_per_tasklet
        kind = job.launch(self._queued.partitions[layout])
        if kind is not None:
            self._work.ran(kind, tokens)
            self._interval.tasklets += 1
            self._interval.finetune_tokens += tokens
        return kind

    def prefill_ended(self, first_tokens: Sequence[tuple[str, float]], load: Load) -> None:
        """A prefill step's result is in; (request, moment of its arrival) got their first token."""
        now = self._time()
        self._load = load
        self._interval.decode_s += now - self._step_began
        self._clock.prefill(now, [r for r in first_tokens if not r[0].startswith(self._calibration_prefix)])
        self._last_decode_end = None
        self._between_steps(now)

    def decode_ended(
        self, requests: Sequence[tuple[str, bool]], load: Load, adapters: Sequence[str | None] = ()
    ) -> None:
        """A decode step's result is in; (request, whether it finished) got a token, and was served with the adapter at
        its place (left out: none of them with any). Runs what fits behind the step."""
        now = self._time()
        self._load = load
        batch = len(requests)
        self._interval.decode_steps += 1
        self._interval.decode_tokens += batch
        if self._engine.queued is None:
            steps_ms = [self._measure(now, batch)]
            self._interval.decode_s += now - self._step_began
            self._predictor.observe_step(WHOLE, batch, load.kv_tokens, steps_ms[0], max_kv=load.max_kv)
        else:
            steps_ms = self._collect()
        if requests and requests[0][0].startswith(self._calibration_prefix):
            if not self._measured(requests):
                for step_ms in steps_ms:
                    self._calibrate(step_ms)
        else:
            names = [rid for rid, _ in requests]
            gap = self._clock.decode(now, requests, self._limits.tenants(names, adapters))
            self._guard.see(now, gap, self._limits.itl_ms(names, adapters), self._predictor.stale)
        self._last_decode_end, self._tasklet_s = now, 0.0
        self._between_steps(now)
        if load.running and self._engine.queued is None:
            self._run(self._plan(now))

    def idle(self, load: Load) -> bool:
        """The engine has nothing to decode. True when finetuning ran, so that the engine should not sleep."""
        now = self._time()
        self._load = load
        self._last_decode_end = None
        self._between_steps(now)
        self._clock.keep(())
        if self._engine.queued is not None:
            return self._pump(self._engine.queued, now)
        view = self._job.view() if self._job is not None else None
        if view is None:
            return False
        if not view.tasklets:  # their layers are on the way; nothing else would wake the engine for them
            time.sleep(_PUMP_S)
            return True
        return self._run(self._plan(now)) > 0

    def _pump(self, queued: Queued, now: float) -> bool:
        """Nothing decodes: keep the whole device fed."""
        queued.executor.other_batch()
        self._collect()
        plan = self._interval.last_plan = self._plan(now)
        if plan.after and self._job is not None:
            queued.executor.idle(plan.after, self)
        if queued.executor.queued_ms() or (self._job is not None and not plan.after):
            time.sleep(_PUMP_S)
        return self._job is not None or queued.executor.queued_ms() > 0

    @property
    def _profiler(self) -> Profiler | None:
        return self._engine.profiling.profiler if self._engine.profiling is not None else None

    def _measures(self, load: Load) -> bool:
        """Whether the batch that is about to be launched is one of the profiler's; its step has then begun."""
        profiling, profiler = self._engine.profiling, self._profiler
        if profiling is None or profiler is None:
            return False
        self._measured_batch = profiling.batch_of(load.running)
        if self._measured_batch is None:
            profiler.leave()
            return False
        profiler.step_begins(self._measured_batch, len(load.running), self._step_size)
        return True

    def _measured(self, requests: Sequence[tuple[str, bool]]) -> bool:
        """Let the profiler take a step's result; whether the step was one of its own."""
        profiling, profiler = self._engine.profiling, self._profiler
        if profiling is None or profiler is None:
            return False
        profiler.step_ended()
        return profiling.batch_of([rid for rid, _ in requests]) is not None

    def finish_calibration(self) -> None:
        """No calibration request will follow: the engine is ready to be announced."""
        if self._calibration is not None:
            if len(self._calibration) >= _CALIBRATION_GAPS // 2:
                self._solo_itl_ms = median(self._calibration)
            self._calibration = None
            if self._engine.profiling is not None:
                self._engine.profiling.finish()
                self._predictor = self._engine.profiling.predictor
                self._relative = {}  # it has yet to be told of the job
            self._engine.announced()
            self._interval = Interval(self._time())
            self._link.reconnected()
            self._say_hello()
            if self._engine.profiling is not None and (why := self._engine.profiling.fallback):
                self._notice("warning", "no_profile", f"{why}; finetuning gets the slack behind the steps only")

    def close(self) -> None:
        """Checkpoint what runs, say goodbye. Called once, on the way out."""
        if self.closed:
            return
        self.closed = True
        if self._engine.profiling is not None:
            self._engine.profiling.close()
        self._link.send(Stopping(engine_id=self._engine.hello.engine_id))
        if self._job is not None:
            self._job.interrupt()
        self._link.send(Goodbye(engine_id=self._engine.hello.engine_id))
        self._link.close()

    # ---- between steps -----------------------------------------------------------------------------------------------

    def _between_steps(self, now: float) -> None:
        if self._calibration is None:
            if self._link.reconnected():
                self._say_hello()
            while (message := self._link.receive()) is not None:
                self._obey(message)
        if self._job is not None:
            self._job.poll()
            if isinstance(self._predictor, TwoStagePredictor) and self._relative is not self._job.relative:
                self._relative = self._job.relative
                self._predictor.another_job(self._relative)
            if self._job.ended:
                self._job = None
                if isinstance(self._predictor, MovingPredictor):
                    self._predictor.forget_tasklets()
        if self._engine.memory is not None:
            self._share_memory(self._engine.memory.look)
        if now - self._interval.started >= REPORT_INTERVAL_S and self._calibration is None:
            self._report(now)

    def _share_memory(self, look: Callable[..., None]) -> None:
        """Let the broker see to it that the KV cache has what it needs."""
        job = self._job
        look(step_ms=self._predicted_ms, restart=job.start_again if job is not None else _nothing)

    def _predicted_ms(self) -> float | None:
        """A step of the present load by itself; None where nothing is known of it."""
        load = self._load
        predicted = self._predictor.decode_ms(WHOLE, max(len(load.running), 1), load.kv_tokens)
        return predicted if isfinite(predicted) else None

    def _plan(self, now: float) -> StepPlan:
        """The policy's plan for the time until the next decode step's result."""
        view = self._job.view() if self._job is not None else None
        if view is None:
            return StepPlan(reason="no job")
        if self._engine.memory is not None and (why := self._engine.memory.waiting) is not None:
            return StepPlan(pause=True, reason=f"memory: {why}")
        load = self._load
        if self._guard.reason and load.running:
            return StepPlan(pause=True, reason=f"guard: {self._guard.reason}")
        queued = self._engine.queued
        applied = self._limits.applied(load.running, load.adapters)
        free_pages, kv_tokens_per_page = self._engine.memory.room if self._engine.memory is not None else (0, 0.0)
        beside = queued.executor.beside_ms() if queued is not None else NO_TIME
        state = StepState(
            batch=len(load.running),
            padded=len(load.running) if queued is None else queued.padded(len(load.running)),
            kv_tokens=load.kv_tokens,
            max_kv=load.max_kv,
            waiting=load.waiting,
            prefill_waiting=load.prefill_waiting,
            slack_ms=self._slack(applied, now),
            inflight_ms=queued.executor.inflight_ms() if queued is not None else 0.0,
            jobs=(view,),
            layouts=tuple(queued.partitions) if queued is not None else (WHOLE,),
            free_pages=free_pages,
            layout=queued.executor.layout if queued is not None else WHOLE,
            beside_ms=beside.bound,
            beside_mean_ms=beside.mean,
            target_ms=self._gap_ms(applied),
            kv_tokens_per_page=kv_tokens_per_page,
        )
        plan, self._memory = self._policy.plan(state, self._predictor, self._memory)
        return plan

    def _gap_ms(self, applied: Sequence[Applied]) -> tuple[float, ...]:
        """For each target of `_slack` the ms that it gives one gap by itself, margin off."""
        share = 1.0 - self._margin
        return tuple([one.target.ms * share for one in applied if one.target.kind != "ttft"])

    def _slack(self, applied: Sequence[Applied], now: float) -> tuple[float, ...]:
        """For each target that applies the ms that the gap to the next token may take, margin off."""
        share = 1.0 - self._margin
        slack = []
        for target, requests in applied:
            if target.kind == "itl":
                slack.append(target.ms * share)
            elif target.kind == "tpot":
                slack.append(self._clock.tpot_slack_ms(target.ms * share, requests, now))
        return tuple(slack)

    def _run(self, plan: StepPlan) -> int:
        """Run a plan's tasklets; returns how many ran."""
        self._interval.last_plan = plan
        ran = 0
        job = self._job
        for _ in range(plan.after if job is not None else 0):
            assert job is not None
            tokens = job.tokens_per_tasklet
            began = self._time()
            kind = job.run_next()
            if self._engine.device.type == "cuda":
                torch.cuda.synchronize(self._engine.device)
            seconds = self._time() - began
            self._tasklet_s += seconds
            self._interval.finetune_s += seconds
            if kind is None:
                break
            ran += 1
            self._work.ran(kind, tokens)
            self._interval.finetune_tokens += tokens
            self._predictor.observe_tasklet(WHOLE, kind, seconds * 1e3)
            if self._engine.memory is not None and self._engine.memory.waiting is not None:
                break
        self._interval.tasklets += ran
        if self._load.running:
            self._interval.after += ran
        return ran

    @property
    def _queued(self) -> Queued:
        assert self._engine.queued is not None
        return self._engine.queued

    def _collect(self) -> list[float]:
        """Learn from what the device has finished; answers the steps' own ms."""
        steps, ran = self._queued.executor.collect()
        for step in steps:
            self._interval.decode_s += step.ms / 1e3
            if step.early:  # a bound that held for these would be far above what other steps take
                continue
            self._predictor.observe_step(
                step.layout, step.padded, step.kv_tokens, step.ms, step.beside, max_kv=step.max_kv
            )
        for one in ran:
            self._interval.finetune_s += one.ms / 1e3
            self._predictor.observe_tasklet(one.layout, one.kind, one.ms, one.padded, one.kv_tokens)
        return [step.ms for step in steps]

    def _measure(self, now: float, batch: int) -> float:
        """The step's own ms: since the last one's end less what finetuning took in between, else since its launch."""
        if self._last_decode_end is None:
            return (now - self._step_began) * 1e3
        return (now - self._last_decode_end - self._tasklet_s) * 1e3

    # ---- start-up ----------------------------------------------------------------------------------------------------

    def _calibrate(self, step_ms: float) -> None:
        if self._calibration is not None:
            self._calibration.append(step_ms)

    def _say_hello(self) -> None:
        job = self._job
        hello = self._engine.hello
        self._link.send(
            Hello(
                **{name: getattr(hello, name) for name in hello.__struct_fields__ if name not in _LIVE_FIELDS},
                solo_itl_ms=self._solo_itl_ms,
                running_job=job.spec.job_id if job is not None else None,
                running_token=job.token if job is not None else None,
            )
        )

    # ---- link --------------------------------------------------------------------------------------------------------

    def _obey(self, message: ToEngine) -> None:
        if isinstance(message, SetTargets):
            self._limits = Limits(message.targets, message.tenants)
            self._targets_version = message.version
            return
        if isinstance(message, StartJob):
            self._start(message)
            return
        job = self._job
        if job is None or (job.spec.job_id, job.token) != (message.job_id, message.token):
            self._notice("warning", "unknown_job", f"job {message.job_id} is not held under token {message.token}")
        elif isinstance(message, PauseJob):
            job.pause()
        elif isinstance(message, StopJob):
            job.stop(message.save)

    def _start(self, message: StartJob) -> None:
        engine_id = self._engine.hello.engine_id
        if self._job is not None:
            if self._job.spec.job_id == message.spec.job_id:
                self._job.token = message.token
                return
            self._link.send(
                JobUpdate(
                    engine_id=engine_id,
                    job_id=message.spec.job_id,
                    token=message.token,
                    time=time.time(),
                    kind="failed",
                    code="engine_busy",
                    message=f"the engine still runs job {self._job.spec.job_id}; submit again when it has ended",
                )
            )
            return
        prepare = self._engine.prepare
        self._work = Work()
        self._job = JobRun(engine_id, message.spec, message.token, lambda: prepare(message), self._link.send)

    def _notice(self, level: str, code: str, text: str) -> None:
        self._link.send(
            EngineNotice(
                engine_id=self._engine.hello.engine_id,
                time=time.time(),
                level=level,  # type: ignore[arg-type]
                code=code,
                message=text,
            )
        )

    def _report(self, now: float) -> None:
        self._mind_the_clock()
        if self._engine.queued is not None:
            self._interval.beside, self._interval.after = self._engine.queued.executor.take_counts()
        load = self._load
        plan = self._interval.last_plan
        pauses, held_s = self._guard.take(now)
        self._link.send(
            self._interval.telemetry(
                now,
                engine_id=self._engine.hello.engine_id,
                device=self._engine.device,
                sm_share=self._engine.gpu.share if self._engine.gpu is not None else None,
                power_w=self._engine.gpu.power_w if self._engine.gpu is not None else None,
                policy=self._policy_name,
                latencies=self._clock.take(),
                running=len(load.running),
                waiting=load.waiting,
                kv_used=load.kv_used,
                kv_total=load.kv_total,
                predicted_step_ms=self._predicted_ms(),
                targets_version=self._targets_version,
                paused_reason=plan.reason if plan.pause else None,
                guard_pauses=pauses,
                guarded_s=held_s,
                memory=self._engine.memory.report() if self._engine.memory is not None else None,
            )
        )
        if self._engine.memory is not None:
            for code, text in self._engine.memory.news():
                self._notice("info", code, text)
        self._interval = Interval(now, last_plan=plan)
        if now - self._learnt_at >= _LEARNT_EVERY_S:
            self._learnt_at = now
            self._tell_learnt()
        if (news := self._guard.news(now, pauses, held_s, job=self._job is not None)) is not None:
            self._notice(*news)

    def _mind_the_clock(self) -> None:
        """At another clock a fitted predictor is wrong until it has corrected itself; one that only averages what it
        sees follows anyway."""
        change = self._engine.gpu.take_change() if self._engine.gpu is not None else ""
        if change and isinstance(self._predictor, TwoStagePredictor):
            self._predictor.distrust(change)

    def _tell_learnt(self) -> None:
        """What a predictor without a profile knows by now; what-if questions are answered from it."""
        if not isinstance(self._predictor, MovingPredictor) or not self._work.steps:
            return
        steps, tasklets = self._predictor.learnt(WHOLE)
        if not tasklets:  # those of a job that has ended are forgotten; what was told of them stays
            return
        self._link.send(
            Learnt(
                engine_id=self._engine.hello.engine_id,
                time=time.time(),
                steps=steps,
                tasklets={kind: known for kind, known in tasklets.items()},  # noqa: C416 - its keys are plain words
                mix=self._work.mix,
                step_tokens=self._work.step_tokens,
            )
        )


def _nothing() -> None:
    """What a job that is not there gives up."""


_LIVE_FIELDS = {"solo_itl_ms", "running_job", "running_token"}
