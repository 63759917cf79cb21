"""Harli's own policy: finetuning beside the decode step and after it, planned together.

For each layout the plan weighs three ways to fill the time that the target leaves: keep the finetune part busy step
after step; or put on it what ends with the decode step and go on with the whole device until the slack is used up; or
one tasklet more than that, the whole device waiting for it. What each trains per ms decides: a step or tasklet that has
to end in time counts with its bound, and what comes of it is told by the mean. The layout ``whole`` has only the slack
behind the step, so time slices and partitions are both among the choices and neither is ever better.

All layouts are compared every `hold` steps, or when the present one no longer holds the target; in between the best
`few` are, every `look` steps. Where a part still works, leaving it means to wait for it, so another layout has to train
more by `gain`. The slack is that of the tightest request, so one that was served early lends what it gained. Slack is
left alone where longer steps would fill the batch with requests, and where they would take finetuning's memory a way
counts for the time in which it would have it (`core.policy.crowding`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from core.policy.allowance import earned
from core.policy.crowding import CALM, Crowding, after_step, frugal_gap, roomy_gap, share_with_memory
from core.policy.fit import NO_MEMORY, blocked, cover, fit, fit_beside, idle, retreat, start_ms
from core.policy.shares import NO_SHARES, Shares, charge, next_job
from core.policy.tasklet_slices import time_slice
from core.policy.types import WHOLE, JobView, Layout, Predictor, StepPlan, StepState, TaskletKind

_WORTH_A_LONGER_GAP = 1.05  # trained per ms, against keeping the part busy: a longer gap means a larger batch


@dataclass(frozen=True, slots=True)
class Knobs:
    """hold: steps between two comparisons of all layouts; few: the best of them, which are compared every `look` steps
    in between; gain: what another layout has to train more for a change while the present part works; yielding: part of
    the extra time that a step with waiting requests gives up; frugal: what of the gap for which there is memory may be
    filled by tasklets behind a step, when that gap is as long as the target's; allowance, idle_ms, quantum_tokens: as
    of `tasklet_slices`."""

    hold: int = 16
    few: int = 3
    look: int = 4
    gain: float = 0.05
    yielding: float = 0.02
    frugal: float = 0.25
    allowance: float = 0.004
    idle_ms: float = 20.0
    quantum_tokens: float = 4096.0


KNOBS = Knobs()


class Memory(NamedTuple):
    """best: the layouts that were best when all of `layouts` were compared, `age` steps ago; crowding: what longer
    steps would do; credit: decode tokens that may be late on purpose; shares: the tenants' accounts."""

    best: tuple[Layout, ...] = ()
    layouts: tuple[Layout, ...] = ()
    age: int = 0
    crowding: Crowding = CALM
    credit: float = 0.0
    shares: Shares = NO_SHARES


MEMORY = Memory()


class _Way(NamedTuple):
    """A way to fill step after step in a layout: trained per ms (times the share of the time in which there is memory
    for it), layout, bound of the decode step, ms until the tasklets beside it end, ms that those after it get (0: the
    finetune part is kept busy into the next step instead), whether what is queued leaves no time for it in this step,
    the ms that the next gap may take, and the bound next to decode of what still runs on the finetune part, of which
    without decode it would take the share `pace`."""

    rate: float
    layout: Layout
    decode_ms: float
    end_ms: float
    after_ms: float
    later: bool
    slack_ms: float
    left_ms: float
    pace: float


class _Question(NamedTuple):
    """What is the same for all layouts of a step: state and predictor, the next tasklet's kind, its bound and mean on
    the whole device, the longest that the gap may be, the shortest that a target gives to one, the longest for which
    memory is roomy enough and what of that tasklets behind a step may use, a step's ms without finetuning, and the part
    of the slack that a time slice may use."""

    state: StepState
    predictor: Predictor
    kind: TaskletKind
    unit_ms: float
    mean_ms: float
    limit_ms: float
    share_ms: float
    roomy_ms: float
    frugal_ms: float
    alone_ms: float
    part: float


def plan(state: StepState, predictor: Predictor, memory: Memory, knobs: Knobs = KNOBS) -> tuple[StepPlan, Memory]:
    """The way that trains most per ms within the target."""
    credit = memory.credit
    best, layouts, age = memory.best, memory.layouts, memory.age + 1
    if reason := blocked(state, predictor):
        answer = StepPlan(retreat(state, predictor), pause=True, reason=reason)
        return answer, Memory(best, layouts, age, memory.crowding, credit, memory.shares)
    job, shares = next_job(state, memory.shares, knobs.quantum_tokens)
    if job is None:
        answer = StepPlan(retreat(state, predictor), pause=True, reason=NO_MEMORY)
        crowding = _crowded(state, predictor, memory.crowding, answer, None, knobs)
        return answer, Memory(best, layouts, age, crowding, credit, shares)
    if not state.batch:
        answer = idle(job, predictor, state, knobs.idle_ms)
        return answer, Memory((), (), 0, memory.crowding, credit, charge(shares, job, answer.after))

    way, question = None, _question(state, predictor, job, memory.crowding, knobs)
    if job.tasklets:
        if age < knobs.hold and layouts == state.layouts:
            way, best = _best(question, best if age % knobs.look == 0 else best[:1], knobs.gain, best)
        if way is None and (best or age >= knobs.hold or layouts != state.layouts):
            way, best = _best(question, state.layouts, knobs.gain, ())
            best, layouts, age = best[: knobs.few], state.layouts, 0
    if state.beside_ms and (way is None or way.later):
        reason = "no layout holds the target" if way is None else f"drains before {way.layout}"
        answer = StepPlan(retreat(state, predictor), job=job.job_id, pause=way is None, reason=reason)
    elif way is None or way.layout == WHOLE or way.later:
        next_ms = way.decode_ms if way is not None else 0.0
        # Only steps that get no part earn it: beside the others the job goes on without.
        credit = earned(credit, state, knobs.allowance)
        answer, credit = time_slice(state, predictor, job, credit, knobs.idle_ms, question.part, next_ms)
    else:
        answer = _fill(state, predictor, job, way)
    crowding = _crowded(state, predictor, memory.crowding, answer, way, knobs)
    shares = charge(shares, job, answer.beside + answer.after)
    return answer, Memory(best, layouts, age, crowding, credit, shares)


def _crowded(
    state: StepState, predictor: Predictor, crowding: Crowding, answer: StepPlan, way: _Way | None, knobs: Knobs
) -> Crowding:
    if not state.kv_tokens_per_page:
        return after_step(crowding, state, 0.0, knobs.yielding)
    if way is not None and way.layout == answer.layout:
        decode = way.decode_ms
    else:
        decode = predictor.decode_upper_ms(WHOLE, state.padded, state.kv_tokens, None, state.max_kv)
    return after_step(crowding, state, start_ms(state, answer.layout) + decode, knobs.yielding)


def _question(state: StepState, predictor: Predictor, job: JobView, crowding: Crowding, knobs: Knobs) -> _Question:
    kind = job.tasklets[0] if job.tasklets else "forward"
    slack = min(state.slack_ms) if state.slack_ms else inf
    share = min(state.target_ms) if state.target_ms else slack
    part, roomy = crowding.part, roomy_gap(crowding, state, job)
    frugal = frugal_gap(roomy, slack, knobs.frugal)
    limit, alone = slack, 0.0
    if slack < inf and (part < 1 or frugal < slack):
        alone = predictor.decode_upper_ms(WHOLE, state.padded, state.kv_tokens, None, state.max_kv)
        if alone < slack:
            limit = alone + part * (slack - alone)
            part = min(part, max(0.0, frugal - alone) / (slack - alone))
    unit, mean = predictor.tasklet_ms(WHOLE, kind), predictor.tasklet_mean_ms(WHOLE, kind)
    return _Question(state, predictor, kind, unit, mean, limit, share, roomy, frugal, alone, part)


def _best(
    question: _Question, layouts: tuple[Layout, ...], gain: float, known: tuple[Layout, ...]
) -> tuple[_Way | None, tuple[Layout, ...]]:
    """The best way of those in `layouts`; and these in the order of what they train, or `known` with the best first."""
    if known and len(layouts) == 1:
        only = _way(question, layouts[0])
        return (None if only is None else _Way(*only)), known
    state = question.state
    busy = state.layout if state.beside_ms or state.inflight_ms else None
    best, most, ranking = None, 0.0, []
    for layout in layouts:
        way = _way(question, layout)
        if way is not None:
            rate = way[0] * (1 + gain) if layout == busy else way[0]
            if rate > most:
                best, most = way, rate
            ranking.append((rate, layout))
    if best is None:
        return None, known
    if known:
        first = best[1]
        order = known if first == known[0] else (first, *[layout for layout in known if layout != first])
    else:
        order = tuple([layout for _, layout in sorted(ranking, reverse=True)])
    return _Way(*best), order


def _way(
    question: _Question, layout: Layout
) -> tuple[float, Layout, float, float, float, bool, float, float, float] | None:
    """The fields of the best `_Way` in one layout, None when its step does not hold the target or nothing fits."""
    state, predictor, kind, unit, mean, limit, share, roomy, frugal, alone, _ = question
    whole = layout == WHOLE
    decode = predictor.decode_upper_ms(layout, state.padded, state.kv_tokens, None if whole else kind, state.max_kv)
    if decode > limit or decode == inf:
        return None
    gap = start_ms(state, layout) + decode
    later = gap > limit
    slack = limit if later or gap <= share else limit - gap + share  # of the next gap
    if frugal < slack:
        slack = max(frugal, decode)
    usual = predictor.decode_ms(layout, state.padded, state.kv_tokens, state.max_kv, None if whole else kind)
    if whole:
        fitting = (slack - decode) // unit if slack < inf else 1.0
        if fitting <= 0:
            return None
        trained = fitting * mean
        return trained / (usual + trained), layout, decode, decode, fitting * unit, later, slack, 0.0, 1.0
    tasklet = predictor.tasklet_ms(layout, kind, state.padded, state.kv_tokens)
    if tasklet == inf:
        return None
    own = predictor.tasklet_mean_ms(layout, kind, state.padded, state.kv_tokens)
    rate, end_ms, after_ms = mean / own, decode, 0.0
    if decode > roomy:
        rate *= share_with_memory(decode, roomy, alone)
    left, pace = 0.0, 1.0
    if layout == state.layout and state.beside_ms:
        pace = predictor.tasklet_ms(layout, kind) / tasklet
        left = state.beside_ms / pace
    count = (decode - left) // tasklet
    fitting = (slack - decode) // unit if slack < inf else 1.0
    if count > 0 and fitting > 0:  # what ends with the decode step
        trained = (count + fitting) * mean / (max(usual, left + count * own) + fitting * mean)
        if trained > rate * _WORTH_A_LONGER_GAP:
            rate, after_ms = trained, fitting * unit
    end = decode + pace * (left + (count + 1) * tasklet - decode)  # one more, which the whole device waits for
    if decode < end < slack - unit:
        fitting = (slack - end) // unit if slack < inf else 1.0
        ends = usual + pace * max(0.0, left + (count + 1) * own - usual)
        trained = (count + 1 + fitting) * mean / (ends + fitting * mean)
        if trained > rate * _WORTH_A_LONGER_GAP:
            rate, end_ms, after_ms = trained, end, fitting * unit
    return rate, layout, decode, end_ms, after_ms, later, slack, left, pace


def _fill(state: StepState, predictor: Predictor, job: JobView, way: _Way) -> StepPlan:
    """The plan of a way: its times filled with the job's next tasklets."""
    layout, left = way.layout, way.left_ms
    if not way.after_ms:
        count = cover(state, predictor, job, layout, way.decode_ms)
        return StepPlan(layout, beside=count, job=job.job_id, reason="finetune part kept busy")
    end = way.decode_ms + (way.end_ms - way.decode_ms) / way.pace
    count, used = fit_beside(state, predictor, job, layout, end - left + 1e-6)
    late = way.pace * max(0.0, left + used - way.decode_ms)
    budget = way.slack_ms - way.decode_ms - late if way.slack_ms < inf else way.after_ms
    after, _ = fit(job, predictor, budget, start=count)
    return StepPlan(layout, count, after, job.job_id, reason="beside and behind the step")
