"""What every policy reckons with: whether finetuning may run at all, how long it may, how many tasklets that is."""

from __future__ import annotations

from functools import lru_cache
from math import ceil, inf

from core.policy.types import WHOLE, JobView, Layout, Predictor, StepPlan, StepState, TaskletKind

NO_MEMORY = "no memory for the next tasklets"


def blocked(state: StepState, predictor: Predictor) -> str:
    """Why this step carries no finetuning whatever the policy, or an empty string."""
    if not state.jobs:
        return "no job"
    if state.prefill_waiting:
        return "prefill waits"
    # What nothing decodes beside cannot break a target, and only steps can make a prediction trusted again.
    if predictor.stale and state.batch:
        return predictor.stale
    return ""


def next_slack(state: StepState, gap_ms: float) -> float:
    """ms that the gap after this one may take, when this one takes `gap_ms`: the slack of the tightest target, less
    what this gap takes beyond its own share. ``inf`` when no target applies."""
    slack = inf
    for now, own in zip(state.slack_ms, state.target_ms or state.slack_ms, strict=True):
        slack = min(slack, now - max(0.0, gap_ms - own))
    return slack


def fit(job: JobView, predictor: Predictor, budget_ms: float, start: int = 0) -> tuple[int, float]:
    """Tasklets of `job` from index `start` on that end within `budget_ms` on the whole device by their upper bounds,
    and the ms that they take."""
    tasklets, at, used = job.tasklets, start, 0.0
    while at < len(tasklets):
        ms = predictor.tasklet_ms(WHOLE, tasklets[at])
        if used + ms > budget_ms:
            break
        count = _alike(tasklets, at, (budget_ms - used) / ms)
        at, used = at + count, used + count * ms
    return at - start, used


def fit_beside(
    state: StepState, predictor: Predictor, job: JobView, layout: Layout, budget_ms: float
) -> tuple[int, float]:
    """Tasklets of `job` that end within `budget_ms` on the layout's finetune part next to decode, by their bounds, and
    their ms."""
    tasklets, at, used = job.tasklets, 0, 0.0
    while at < len(tasklets):
        ms = predictor.tasklet_ms(layout, tasklets[at], state.padded, state.kv_tokens)
        if used + ms > budget_ms:
            break
        count = _alike(tasklets, at, (budget_ms - used) / ms)
        at, used = at + count, used + count * ms
    return at, used


def cover(state: StepState, predictor: Predictor, job: JobView, layout: Layout, budget_ms: float) -> int:
    """Tasklets of `job` that keep the layout's finetune part busy for `budget_ms` next to decode, with those that still
    run there: on average, since a part that is full by the bounds of its tasklets runs dry in most steps."""
    tasklets, at = job.tasklets, 0
    if layout == state.layout and state.beside_mean_ms and tasklets:
        alone = predictor.tasklet_mean_ms(layout, tasklets[0])
        budget_ms -= state.beside_mean_ms * (
            predictor.tasklet_mean_ms(layout, tasklets[0], state.padded, state.kv_tokens) / alone
        )
    while at < len(tasklets) and budget_ms > 0:
        ms = predictor.tasklet_mean_ms(layout, tasklets[at], state.padded, state.kv_tokens)
        if ms == inf:
            break
        count = _alike(tasklets, at, ceil(budget_ms / ms))
        at, budget_ms = at + count, budget_ms - count * ms
    return at


def _alike(tasklets: tuple[TaskletKind, ...], start: int, most: float) -> int:
    """How many tasklets from `start` on are of one kind, one at least and `most` at most."""
    run = tasklets[start : start + max(1, int(min(most, len(tasklets))))]
    kind = run[0]
    if run.count(kind) == len(run):
        return len(run)
    return next(n for n, other in enumerate(run) if other != kind)


def keep_busy(state: StepState, predictor: Predictor, job: JobView, layout: Layout) -> int:
    """Tasklets of `job` that keep the layout's finetune part busy during this step, with those that still run there."""
    if not job.tasklets:
        return 0
    step = predictor.decode_upper_ms(layout, state.padded, state.kv_tokens, job.tasklets[0], state.max_kv)
    if step == inf:
        return 0 if layout == state.layout and state.beside_ms else 1
    return cover(state, predictor, job, layout, step)


def start_ms(state: StepState, layout: Layout) -> float:
    """When a step in that layout can start: what is queued before it has to end, and so has work on another part."""
    return state.inflight_ms if layout == state.layout else max(state.inflight_ms, state.beside_ms)


def retreat(state: StepState, predictor: Predictor) -> Layout:
    """The layout of a step that gets no finetuning: ``whole``, unless work still runs on the finetune part and waiting
    for it would take longer than a step next to it."""
    if not state.beside_ms or not state.batch:
        return WHOLE
    kind = state.jobs[0].tasklets[0] if state.jobs and state.jobs[0].tasklets else "forward"
    stay = predictor.decode_upper_ms(state.layout, state.padded, state.kv_tokens, kind, state.max_kv)
    leave = predictor.decode_upper_ms(WHOLE, state.padded, state.kv_tokens, None, state.max_kv) + state.beside_ms
    return state.layout if stay < leave else WHOLE


@lru_cache(maxsize=64)
def splits(layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
    """The split layouts among those, the largest finetune part first."""
    return tuple(sorted((layout for layout in layouts if layout.kind == "split"), key=lambda s: -s.finetune_sms))


def idle(job: JobView, predictor: Predictor, state: StepState, idle_ms: float) -> StepPlan:
    """Nothing decodes: a bounded run of tasklets on the whole device, one at least once the queue is empty."""
    count, _ = fit(job, predictor, idle_ms - state.inflight_ms)
    if not count and not state.inflight_ms:
        count = min(1, len(job.tasklets))
    return StepPlan(after=count, job=job.job_id, pause=not count, reason="nothing decodes")
