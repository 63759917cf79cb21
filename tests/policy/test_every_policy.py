"""What holds for all policies, whatever the state."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from core.policy import POLICIES, bind
from core.policy.types import WHOLE, JobView, Layout, StepPlan, StepState
from tests.policy.clockwork import CONFINED, HALF, KINDS, LAYOUTS, SMALL, Clockwork, state

NAMES = sorted(POLICIES)
# Making a state takes longer than any policy takes with it: each is shown to all of them.
HOLDING = ("hybrid", "harli", "tasklet_slices", "step_slices")
ABSENT = Layout("split", 32, 100)  # the predictor knows no such partition, and no state has it


@st.composite
def states(draw: st.DrawFn) -> StepState:
    batch = draw(st.integers(0, 64))
    parts = draw(st.lists(st.sampled_from((SMALL, HALF, CONFINED)), unique=True))
    targets = draw(st.lists(st.floats(1.0, 60.0), max_size=2)) if batch else []
    jobs = tuple(
        JobView(
            f"job{n}", KINDS[draw(st.integers(0, len(KINDS))) :], tenant=draw(st.sampled_from("ab")),
            weight=draw(st.floats(0.1, 4.0)), priority=draw(st.integers(-1, 1)), tokens_per_tasklet=10.0,
            pages=draw(st.integers(0, 40)), boundary=draw(st.booleans()),
        )
        for n in range(draw(st.integers(0, 3)))
    )  # fmt: skip
    layout = draw(st.sampled_from((WHOLE, *parts)))
    left = draw(st.floats(0.0, 12.0)) if layout != WHOLE else 0.0
    return StepState(
        batch=batch, padded=batch, kv_tokens=500 * batch, max_kv=500, waiting=draw(st.integers(0, 3)),
        prefill_waiting=draw(st.sampled_from((0, 0, 0, 700))),
        slack_ms=tuple(target + draw(st.floats(-30.0, 30.0)) for target in targets), target_ms=tuple(targets),
        inflight_ms=draw(st.sampled_from((0.0, 0.0, 2.5, 11.0))), jobs=jobs, layouts=(WHOLE, *parts),
        free_pages=draw(st.integers(0, 60)), layout=layout,
        beside_ms=left, beside_mean_ms=left * draw(st.floats(0.5, 1.0)),
    )  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.lists(states(), min_size=1, max_size=6))
def test_a_plan_can_be_carried_out(run: list[StepState]) -> None:
    for name in NAMES:
        note(name)
        policy, device = bind(name), Clockwork()
        memory = policy.MEMORY
        for now in run:
            plan, memory = policy.plan(now, device, memory)
            can_be_carried_out(plan, now)


def can_be_carried_out(plan: StepPlan, now: StepState) -> None:
    tasklets = plan.beside + plan.after
    assert plan.layout in now.layouts
    assert plan.beside >= 0 and plan.after >= 0
    assert plan.reason
    if plan.layout == WHOLE:
        assert not plan.beside
    if tasklets:
        job = next(job for job in now.jobs if job.job_id == plan.job)
        assert tasklets <= len(job.tasklets)
        assert job.pages <= now.free_pages
        assert job is now.jobs[0] or now.jobs[0].boundary
        assert not now.prefill_waiting
        assert not plan.pause


@settings(max_examples=50, deadline=None)
@given(states())
def test_the_same_state_and_memory_give_the_same_plan(now: StepState) -> None:
    for policy in map(bind, NAMES):
        assert policy.plan(now, Clockwork(), policy.MEMORY) == policy.plan(now, Clockwork(), policy.MEMORY), policy


@settings(max_examples=50, deadline=None)
@given(states(), st.sampled_from(("memory", "prefill", "stale", "no job")))
def test_the_plan_is_decode_alone_when_finetuning_may_not_run(now: StepState, why: str) -> None:
    now = {
        "memory": replace(now, free_pages=-1),
        "prefill": replace(now, prefill_waiting=100),
        # Where nothing decodes, no bound is asked for.
        "stale": replace(now, batch=8, padded=8, slack_ms=(20.0,), target_ms=(20.0,)),
        "no job": replace(now, jobs=()),
    }[why]
    device = Clockwork(stale="bounds were missed" if why == "stale" else "")
    for policy in map(bind, NAMES):
        plan, _ = policy.plan(now, device, policy.MEMORY)
        assert plan.beside == plan.after == 0, policy


@settings(max_examples=200, deadline=None)
@given(states(), st.floats(-5.0, 6.0))
def test_a_target_under_a_step_of_decode_alone_leaves_no_finetuning(now: StepState, slack: float) -> None:
    now = replace(now, batch=8, padded=8, slack_ms=(slack,), target_ms=(6.0,), jobs=state().jobs)
    for policy in (bind(name) for name in NAMES if name != "static"):
        memory = policy.MEMORY
        for _ in range(3):
            plan, memory = policy.plan(now, Clockwork(), memory)
            assert plan.beside == plan.after == 0, policy


@settings(max_examples=300, deadline=None)
@given(states())
def test_what_is_planned_holds_the_tightest_target_by_the_bounds(now: StepState) -> None:
    for name in HOLDING:
        note(name)
        holds_the_tightest_target(name, now)


def holds_the_tightest_target(name: str, now: StepState) -> None:
    policy, device = bind(name, **({"allowance": 0.0} if name in ("hybrid", "tasklet_slices") else {})), Clockwork()
    plan, _ = policy.plan(now, device, policy.MEMORY)
    if not now.batch or not now.slack_ms or not plan.beside + plan.after:
        return
    kinds = next(job for job in now.jobs if job.job_id == plan.job).tasklets
    part = [device.tasklet_ms(plan.layout, kind) for kind in kinds[: plan.beside]]
    whole = [device.tasklet_ms(WHOLE, kind) for kind in kinds[plan.beside : plan.beside + plan.after]]
    kind = kinds[0] if plan.layout != WHOLE else None
    decode = device.decode_upper_ms(plan.layout, now.padded, now.kv_tokens, kind)
    same = plan.layout == now.layout
    start = now.inflight_ms if same else max(now.inflight_ms, now.beside_ms)
    gap = start + decode
    if plan.beside:
        assert gap <= min(now.slack_ms) + 1e-9
    if plan.after:
        rest = max(0.0, (now.beside_ms if same else 0.0) + sum(part) - decode)
        left = [slack - max(0.0, gap - own) for slack, own in zip(now.slack_ms, now.target_ms, strict=True)]
        assert rest + sum(whole) + decode <= min(left) + 1e-5


def test_a_policy_is_found_by_name_and_its_knobs_are_checked() -> None:
    assert bind("static", finetune_sms=20).knobs.finetune_sms == 20
    with pytest.raises(KeyError):
        bind("none")
    with pytest.raises(TypeError):
        bind("hybrid", speed=1)
    with pytest.raises(TypeError, match="no knobs"):
        bind("solo", speed=1)


@pytest.mark.parametrize("name", NAMES)
def test_a_partition_without_a_prediction_is_left_alone(name: str) -> None:
    policy, memory = bind(name), bind(name).MEMORY
    plan, _ = policy.plan(state(slack_ms=(40.0,), layouts=(WHOLE, ABSENT)), Clockwork(), memory)
    assert name == "static" or plan.layout == WHOLE
    assert set(LAYOUTS) >= {plan.layout} or name == "static"
