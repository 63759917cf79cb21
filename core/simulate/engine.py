"""The discrete-event loop: one engine that decodes and finetunes as the policy plans.

Time of a step, as on a GPU: the plan of step n is made when decode n - 1 has ended and its `after` is queued behind it.
Decode n waits for that queue; `beside` runs next to it on the finetune part and slows it as long as both run; `after`
waits for both and delays decode n + 1. Without `after`, what is left of `beside` runs on into the next step, unless
that has another layout: then it waits. So a gap between two tokens is the queued work plus the decode step. With
nothing to decode, the policy is asked again whenever its last tasklets are done; a request that comes meanwhile waits
for them.

Not simulated: the host's launches, mapping and swapping of memory (they run beside decode), thermal clocks (see
`Scenario.drift`), and that a captured graph of one layout may not read the activations of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf

import numpy as np

from core.errors import Invalid
from core.policy.bound import BoundPolicy
from core.policy.types import WHOLE, Layout, Predictor, StepPlan, StepState, TaskletKind
from core.simulate.batch import Request, RunningBatch
from core.simulate.device import HEAD_PARTS, KV_BLOCK_TOKENS, Cell, Device, Program
from core.simulate.outcome import Outcome, Steps
from core.simulate.scenario import Scenario
from core.simulate.trainer import Trainer

_SPREAD = 4096  # equally likely values that the noise is drawn from
_DRAWS = 1 << 16
_PREFILL_CHUNK = 8192
_MAX_PREFILL = 16384


class Simulation:
    """One run of a scenario; `run` may be called once. The same arguments give the same outcome."""

    def __init__(
        self,
        scenario: Scenario,
        device: Device,
        policy: BoundPolicy,
        predictor: Predictor,
        programs: Sequence[Program] | None = None,
    ) -> None:
        """programs: micro-batches in other shapes than the device's own (whose head is cut so that no tasklet of it is
        longer than a layer's, and which goes through the model in chunks for a policy that has a `chunk_tokens` knob).
        """
        self._scenario = scenario
        self._device = device
        self._policy = policy
        self._predictor = predictor
        chunk_tokens = getattr(policy.knobs, "chunk_tokens", None)
        self._programs = tuple(programs or [Program(device, head_parts=HEAD_PARTS, chunk_tokens=chunk_tokens)])
        self._trainer = Trainer(scenario.jobs, self._programs, device.profile.tasklets.state_pages, scenario.seed)
        self._batch = RunningBatch(scenario.arrivals, scenario.target_ms)
        self._memory = policy.MEMORY
        self._pages = device.profile.arena_pages
        self._kv_limit = min(scenario.kv_tokens or device.kv_tokens, device.kv_tokens)
        self._max_running = min(scenario.max_running, device.max_batch)
        self._padded = [0, *(device.padded(size) for size in range(1, self._max_running + 1))]
        self._steps = Steps()
        # the queue behind the last decode step: decode may start at _ready_ms; _rest is beside work that runs on
        self._ready_ms = 0.0
        self._rest_ms = 0.0
        self._rest_kind: TaskletKind | None = None
        self._layout: Layout = WHOLE
        self._check_requests()

    def run(self) -> Outcome:
        """Simulate to the end. Errors: `Invalid` for a plan that cannot be carried out."""
        scenario, batch, trainer = self._scenario, self._batch, self._trainer
        here = scenario.prefill == "here"
        end_ms = scenario.seconds * 1e3
        random = np.random.default_rng([scenario.seed, 0])
        spread = self._device.noise(_SPREAD)
        drift = sorted(scenario.drift, reverse=True)
        slower = 1.0
        draws: list[int] = []
        warm_ms, warm_tokens = scenario.warmup_s * 1e3, 0.0
        now = 0.0
        while now < end_ms:
            if now >= warm_ms:
                warm_tokens, warm_ms = trainer.tokens(), inf
            if batch.next_ms <= now:
                batch.arrive(now, not here)
            if trainer.next_ms <= now:
                trainer.arrive(now)
            if batch.waiting:
                now = self._admit(now, here)
            if not batch.size:
                now = self._idle(now, end_ms)
                continue
            self._make_room()
            while drift and drift[-1][0] * 1e3 <= now:
                slower = drift.pop()[1]
            if not draws:
                draws = random.integers(0, _SPREAD, _DRAWS).tolist()
            now = self._decode(now, spread[draws.pop()], slower)
        return Outcome(
            scenario, self._steps, batch.finished, batch.arrived, batch.size, len(batch.waiting), batch.retracted,
            trainer, warm_tokens, min(now, end_ms) / 1e3, self.exclusive_tokens_s(),
        )  # fmt: skip

    def exclusive_tokens_s(self) -> float:
        """Finetune tokens per second without decode and without chunks."""
        speed = self._device.alone_speed(WHOLE)
        whole = Program(self._device)
        return whole.tokens / whole.total_ms * speed * 1e3

    # ---- one decode step ---------------------------------------------------------------------------------------------

    def _decode(self, now: float, noise: float, slower: float) -> float:
        """Plan and run one step; the time at which its tokens are out."""
        batch, trainer, device, predictor = self._batch, self._trainer, self._device, self._predictor
        scenario = self._scenario
        size, kv_tokens = batch.size, batch.kv_tokens
        padded = self._padded[size]
        max_kv = batch.max_kv()
        slack = batch.slack_ms(now) if scenario.target_kind == "tpot" else scenario.target_ms
        queued = self._ready_ms - now
        old, rest, rest_kind = self._layout, self._rest_ms, self._rest_kind
        rest_alone = rest / device.alone_speed(old) if rest else 0.0
        plan = self._plan(size, padded, kv_tokens, max_kv, slack, max(queued, 0.0), rest_alone)

        layout = plan.layout
        start = self._ready_ms if queued > 0 else now
        if rest and layout != old:
            start, rest, rest_kind = max(start, now + rest_alone), 0.0, None
        beside, after = plan.beside, plan.after
        first_kind, first_ms = None, 0.0
        if beside or after:
            assert plan.job is not None
            first_kind, first_ms = trainer.kinds(plan.job)
        if beside:
            rest += trainer.launch(plan.job or "", beside, now)
            rest_kind = rest_kind or first_kind
        cell = device.step(start, layout, padded, kv_tokens, max_kv)
        ms, left = step_ms(cell, rest, noise)
        ms *= slower
        end = start + ms
        missed = predictor.observe_step(layout, padded, kv_tokens, ms, rest_kind if rest else None, max_kv)
        if beside and first_kind:
            predictor.observe_tasklet(layout, first_kind, first_ms / cell[4], padded, kv_tokens)
        ready = end
        if after:
            if beside:
                first_kind, first_ms = trainer.kinds(plan.job or "")
            whole = device.alone_speed(WHOLE)
            work = trainer.launch(plan.job or "", after, now)
            ready += left / device.alone_speed(layout) + work / whole
            left = 0.0
            predictor.observe_tasklet(WHOLE, first_kind or "forward", first_ms / whole)
        self._ready_ms, self._rest_ms, self._layout = ready, left, layout
        self._rest_kind = rest_kind if left else None
        self._steps.add(end, end - now, ms, size, layout, beside, after, missed, slack)
        batch.stepped(end)
        return end

    def _plan(
        self, size: int, padded: int, kv_tokens: int, max_kv: int, slack: float, inflight: float, rest_ms: float
    ) -> StepPlan:
        batch, trainer, device = self._batch, self._trainer, self._device
        state = StepState(
            size,
            padded,
            kv_tokens,
            max_kv,
            len(batch.waiting),
            batch.waiting_tokens if self._scenario.prefill == "here" else 0,
            (slack,) if size else (),
            inflight,
            trainer.views(),
            device.layouts,
            self._free_pages(),
            self._layout,
            rest_ms,
            rest_ms,
            (self._scenario.target_ms,) if size else (),
            KV_BLOCK_TOKENS / device.pages_per_block,
        )
        plan, self._memory = self._policy.plan(state, self._predictor, self._memory)
        if plan.beside or plan.after:
            self._check(plan, state)
        return plan

    def _check(self, plan: StepPlan, state: StepState) -> None:
        """The runtime would refuse such a plan, so a policy that makes one must not get figures."""
        where = f"policy {self._policy.name}"
        if plan.layout not in state.layouts:
            raise Invalid("plan", f"{where}: layout {plan.layout} does not exist; plan one of state.layouts", "layout")
        if plan.beside and plan.layout == WHOLE:
            raise Invalid("plan", f"{where}: {plan.beside} tasklets beside in layout whole; plan a part", "beside")
        view = next((view for view in state.jobs if view.job_id == plan.job), None)
        if view is None:
            raise Invalid("plan", f"{where}: job {plan.job!r} is not in state.jobs; plan one that is", "job")
        if view.pages > state.free_pages:
            raise Invalid("plan", f"{where}: {view.pages} pages of memory, {state.free_pages} are free", "job")
        if plan.beside + plan.after > len(view.tasklets):
            raise Invalid("plan", f"{where}: more tasklets than the job showed ({len(view.tasklets)})", "after")

    # ---- memory and admission ----------------------------------------------------------------------------------------

    def _kv_pages(self, tokens: int) -> int:
        return ceil(tokens / KV_BLOCK_TOKENS) * self._device.pages_per_block

    def _free_pages(self) -> int:
        """Arena pages that finetuning may take: what KV cache, its reserve and finetuning itself leave."""
        kv = self._kv_pages(self._batch.kv_tokens + self._batch.size)
        reserve = self._scenario.reserve_blocks * self._device.pages_per_block
        return max(0, self._pages - kv - reserve - self._trainer.held_pages)

    def _fits(self, kv_tokens: int) -> bool:
        """Whether that many KV tokens fit; finetuning gives back what they need."""
        if kv_tokens > self._kv_limit:
            return False
        missing = self._kv_pages(kv_tokens) + self._trainer.held_pages - self._pages
        if missing > 0:
            self._trainer.release(missing)
        return True

    def _make_room(self) -> None:
        """Room for one more token of each running request, at worst by retraction."""
        batch = self._batch
        while not self._fits(batch.kv_tokens + batch.size):
            batch.retract()

    def _admit(self, now: float, here: bool) -> float:
        """Waiting requests join as far as batch and KV cache allow; with prefill here it takes its time."""
        batch = self._batch
        while batch.waiting:
            chosen: list[Request] = []
            tokens, kv_tokens, size = 0, batch.kv_tokens, batch.size
            while batch.waiting and size < self._max_running:
                request = batch.waiting[0]
                need = request.input_tokens + request.emitted
                if here and chosen and tokens + need > _MAX_PREFILL:
                    break
                if not self._fits(kv_tokens + need + 2 * (size + 1)):
                    break
                chosen.append(batch.take())
                tokens, kv_tokens, size = tokens + need, kv_tokens + need, size + 1
            if not chosen:
                return now
            if here:
                now = self._prefill(chosen, now)
            for request in chosen:
                batch.join(request, now)
            if not here:
                return now
            batch.arrive(now, False)
        return now

    def _prefill(self, chosen: list[Request], now: float) -> float:
        """Prefill a batch of prompts in chunks; decode and finetuning stand still meanwhile."""
        device = self._device
        start = max(now, self._ready_ms)
        if self._rest_ms:
            start = max(start, now + self._rest_ms / device.alone_speed(self._layout))
        ms = 0.0
        for request in chosen:
            done, need = 0, request.input_tokens + request.emitted
            while done < need:
                chunk = min(_PREFILL_CHUNK, need - done)
                ms += device.prefill_ms(chunk, done)
                done += chunk
        end = start + ms
        self._ready_ms, self._rest_ms, self._rest_kind = end, 0.0, None
        for request in chosen:
            if not request.emitted:
                request.emitted, request.first_ms, request.last_ms = 1, end, end
        self._steps.stall(end - now, self._batch.size)
        return end

    def _idle(self, now: float, end_ms: float) -> float:
        """Nothing decodes: finetuning in the portions that the policy plans, until a request or a job comes."""
        trainer = self._trainer
        now = max(now, self._ready_ms, now + self._rest_ms / self._device.alone_speed(self._layout))
        self._rest_ms, self._rest_kind = 0.0, None
        coming = min(self._batch.next_ms, trainer.next_ms, end_ms)
        if coming <= now:
            return now if now < end_ms else end_ms
        plan = self._plan(0, 0, 0, 0, inf, 0.0, 0.0) if trainer.runs else StepPlan()
        if plan.beside or not plan.after:
            return coming
        kind, ms = trainer.kinds(plan.job or "")
        speed = self._device.alone_speed(WHOLE)
        ends = now + trainer.launch(plan.job or "", plan.after, now) / speed
        self._predictor.observe_tasklet(WHOLE, kind, ms / speed)
        self._ready_ms, self._layout = ends, WHOLE
        self._steps.idle(ends - now)
        return ends

    def _check_requests(self) -> None:
        limit = self._kv_limit - 4
        for number, arrival in enumerate(self._scenario.arrivals, 1):
            if arrival.input_tokens + arrival.output_tokens > limit:
                raise Invalid(
                    "trace_too_long",
                    f"request {number} of the trace has {arrival.input_tokens} + {arrival.output_tokens} tokens, the "
                    f"KV cache holds {self._kv_limit}; leave such requests out",
                    "trace",
                )


def step_ms(cell: Cell, work_ms: float, noise: float) -> tuple[float, float]:
    """ms of a decode step with `work_ms` of finetuning queued on the part beside it, and what is left of that. The step
    is slowed for as long as finetuning runs next to it."""
    alone = cell[0] * (1.0 + cell[2] * noise)
    if not work_ms:
        return alone, 0.0
    both = cell[1] * (1.0 + cell[3] * noise)
    done = both * cell[4]
    if work_ms >= done:
        return both, work_ms - done
    overlap = work_ms / cell[4]
    return overlap + alone * (1.0 - overlap / both), 0.0
