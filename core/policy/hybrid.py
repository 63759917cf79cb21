"""Harli's own policy: finetuning beside the decode step and after it, planned together.

For each layout the plan weighs three ways to fill the time that the target leaves: keep the finetune part busy step
after step; or put on it what ends with the decode step and go on with the whole device until the slack is used up; or
one tasklet more than that, the whole device waiting for it. What each trains per ms decides. The layout ``whole`` has
only the slack behind the step, so time slices and partitions are both among the choices and neither is ever better.

All layouts are compared every `hold` steps, or when none of the best still holds the target; in between the `few` best
are. Where a part still works, leaving it means to wait for it, so another layout has to train more by `gain`. The slack
is that of the tightest request, so one that was served early lends what it gained. While requests wait for a place in
the batch, a growing part of the slack is left alone: a longer step serves fewer of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from core.policy.allowance import earned
from core.policy.fit import NO_MEMORY, blocked, fit, fit_beside, idle, next_slack, retreat, start_ms
from core.policy.shares import NO_SHARES, Shares, charge, next_job
from core.policy.tasklet_slices import time_slice
from core.policy.types import WHOLE, JobView, Layout, Predictor, StepPlan, StepState, TaskletKind


@dataclass(frozen=True, slots=True)
class Knobs:
    """hold: steps between two comparisons of all layouts; few: layouts that are compared in between; gain: what another
    layout has to train more for a change while the present part works; yielding: part of the extra time that each step
    with waiting requests gives up, a step without any giving back a quarter of it; allowance, idle_ms, quantum_tokens:
    as of `tasklet_slices`."""

    hold: int = 16
    few: int = 3
    gain: float = 0.05
    yielding: float = 0.0
    allowance: float = 0.004
    idle_ms: float = 20.0
    quantum_tokens: float = 4096.0


KNOBS = Knobs()


@dataclass(frozen=True, slots=True)
class Memory:
    """best: layouts that were best when all were compared, age steps ago; squeeze: part of the extra time that may be
    used; credit: decode tokens that may be late on purpose; shares: the tenants' accounts."""

    best: tuple[Layout, ...] = ()
    age: int = 0
    squeeze: float = 1.0
    credit: float = 0.0
    shares: Shares = NO_SHARES


MEMORY = Memory()


class _Way(NamedTuple):
    """A way to fill step after step in a layout: trained per ms, bound of the decode step, ms that tasklets beside it
    get, ms that those after it get (0: the finetune part is kept busy into the next step instead), and whether what is
    queued leaves no time for it in this step."""

    rate: float
    layout: Layout
    decode_ms: float
    beside_ms: float = 0.0
    after_ms: float = 0.0
    later: bool = False


def plan(state: StepState, predictor: Predictor, memory: Memory, knobs: Knobs = KNOBS) -> tuple[StepPlan, Memory]:
    """The way that trains most per ms within the target."""
    credit = earned(memory.credit, state, knobs.allowance)
    squeeze = memory.squeeze
    if state.waiting:
        squeeze *= 1 - knobs.yielding
    elif squeeze < 1:
        squeeze = min(1.0, squeeze + knobs.yielding / 4)
    if reason := blocked(state, predictor):
        return StepPlan(retreat(state, predictor), pause=True, reason=reason), Memory(
            memory.best, memory.age, squeeze, credit, memory.shares
        )
    job, shares = next_job(state, memory.shares, knobs.quantum_tokens)
    if job is None:
        return StepPlan(retreat(state, predictor), pause=True, reason=NO_MEMORY), Memory(
            memory.best, memory.age, squeeze, credit, shares
        )
    if not state.batch:
        answer = idle(job, predictor, state, knobs.idle_ms)
        return answer, Memory(memory.best, knobs.hold, squeeze, credit, charge(shares, job, answer.after))

    best, age, way = memory.best, memory.age + 1, None
    if job.tasklets:
        unit = predictor.tasklet_ms(WHOLE, job.tasklets[0])
        if age < knobs.hold:
            ways = _ways(state, predictor, best, job.tasklets[0], unit, squeeze, knobs.gain)
        if age >= knobs.hold or (len(best) != 1 and not ways):
            ways = _ways(state, predictor, state.layouts, job.tasklets[0], unit, squeeze, knobs.gain)
            ways.sort(reverse=True)
            best, age = (WHOLE, *[way.layout for way in ways[: knobs.few] if way.layout != WHOLE]), 0
        way = max(ways, default=None)
    if state.beside_ms and (way is None or way.later):
        reason = "no layout holds the target" if way is None else f"drains before {way.layout}"
        answer = StepPlan(retreat(state, predictor), job=job.job_id, pause=way is None, reason=reason)
    elif way is None or way.layout == WHOLE or way.later:
        next_ms = way.decode_ms if way is not None else 0.0
        answer, credit = time_slice(state, predictor, job, credit, knobs.idle_ms, squeeze, next_ms)
    else:
        answer = _fill(state, predictor, job, way)
    shares = charge(shares, job, answer.beside + answer.after)
    return answer, Memory(best, age, squeeze, credit, shares)


def _ways(
    state: StepState,
    predictor: Predictor,
    layouts: tuple[Layout, ...],
    kind: TaskletKind,
    unit: float,
    squeeze: float,
    gain: float,
) -> list[_Way]:
    """The best way of each layout that has one."""
    ways = []
    for layout in layouts:
        way = _way(state, predictor, layout, kind, unit, squeeze)
        if way is not None:
            if layout == state.layout and (state.beside_ms or state.inflight_ms):
                way = way._replace(rate=way.rate * (1 + gain))
            ways.append(way)
    return ways


def _way(
    state: StepState, predictor: Predictor, layout: Layout, kind: TaskletKind, unit: float, squeeze: float
) -> _Way | None:
    """The best way in one layout, None when its step does not hold the target or nothing fits. unit: ms of the next
    tasklet, which is of `kind`, on the whole device."""
    beside = None if layout == WHOLE else kind
    decode = predictor.decode_upper_ms(layout, state.padded, state.kv_tokens, beside, state.max_kv)
    if decode == inf:
        return None
    gap = start_ms(state, layout) + decode
    later = gap > min(state.slack_ms, default=inf)
    slack = next_slack(state, decode if later else gap)
    if beside is None:
        after = (slack - decode) * squeeze // unit * unit if slack < inf else unit
        return _Way(after / (decode + after), layout, decode, after_ms=after, later=later) if after > 0 else None
    if squeeze < 1:
        alone = predictor.decode_upper_ms(WHOLE, state.padded, state.kv_tokens, None, state.max_kv)
        slack = alone + (slack - alone) * squeeze
    tasklet = predictor.tasklet_ms(layout, kind, state.padded, state.kv_tokens)
    if tasklet == inf or decode > slack:
        return None
    rate, beside_ms, after_ms = unit / tasklet, decode, 0.0
    left = state.beside_ms if layout == state.layout else 0.0
    count = (decode - left) // tasklet
    for number in (count, count + 1):
        end = max(decode, left + number * tasklet)
        after = (slack - end) // unit * unit if slack < inf else unit
        if number > 0 and after > 0 and (trained := (number * unit + after) / (end + after)) > rate:
            rate, beside_ms, after_ms = trained, end - left, after
    return _Way(rate, layout, decode, beside_ms, after_ms, later)


def _fill(state: StepState, predictor: Predictor, job: JobView, way: _Way) -> StepPlan:
    """The plan of a way: its times filled with the job's next tasklets."""
    layout = way.layout
    left = state.beside_ms if layout == state.layout else 0.0
    if not way.after_ms:
        count, _ = fit_beside(state, predictor, job, layout, way.decode_ms - left, cover=True)
        return StepPlan(layout, beside=count, job=job.job_id, reason="finetune part kept busy")
    count, used = fit_beside(state, predictor, job, layout, way.beside_ms + 1e-6, cover=False)
    late = max(0.0, left + used - way.decode_ms)
    slack = next_slack(state, start_ms(state, layout) + way.decode_ms)
    budget = slack - way.decode_ms - late if slack < inf else way.after_ms
    after, _ = fit(job, predictor, budget, start=count)
    return StepPlan(layout, count, after, job.job_id, reason=f"beside, and {budget:.1f} ms behind the step")
