"""Facts about the simulated engine: the time of a step, memory, admission, conservation, determinism."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import Invalid
from core.policy import bind
from core.policy.types import WHOLE, JobView, Layout, StepPlan, StepState
from core.predictor.moving import MovingPredictor
from core.simulate.device import Device, Program
from core.simulate.engine import Simulation
from core.simulate.outcome import Outcome
from core.simulate.scenario import FinetuneJob, Scenario
from core.workload.arrivals import Arrival
from tests.simulate.small_device import SPLIT, planned, small_profile


def run(device: Device, choose: object, arrivals: list[Arrival], seconds: float = 1.0, **scenario: object) -> Outcome:
    policy = planned(choose) if callable(choose) else choose
    given_scenario = Scenario(arrivals, seconds, scenario.pop("target_ms", 10.0), **scenario)  # type: ignore[arg-type]
    return Simulation(given_scenario, device, policy, MovingPredictor(), [Program(device)]).run()  # type: ignore[arg-type]


def nothing(state: StepState) -> StepPlan:
    return StepPlan()


def when_decoding(**plan: object) -> object:
    return lambda state: StepPlan(job="job", **plan) if state.batch else StepPlan()  # type: ignore[arg-type]


LONG = [Arrival(0.0, 100, 400)]


# ---- the time of a step --------------------------------------------------------------------------------------------


def test_a_step_alone_takes_what_the_device_says(small: Device) -> None:
    steps = run(small, nothing, LONG, 0.1).steps
    assert steps.gap_ms[:3] == pytest.approx([4.1] * 3)


def test_requests_that_came_during_a_step_join_the_next(small: Device) -> None:
    arrivals = [Arrival(0.0, 100, 400), Arrival(0.001, 100, 400), Arrival(0.002, 100, 400)]
    steps = run(small, nothing, arrivals, 0.1).steps
    assert steps.batch[:3] == [1, 3, 3]
    assert steps.ms[1] == pytest.approx(4.4)  # three run as the captured four


def test_after_delays_the_next_step_not_its_own(small: Device) -> None:
    steps = run(small, when_decoding(after=3), LONG, 0.1).steps
    assert steps.gap_ms[:3] == pytest.approx([4.1, 7.1, 7.1])


def test_what_is_queued_is_in_the_next_state(small: Device) -> None:
    seen: list[StepState] = []

    def choose(state: StepState) -> StepPlan:
        seen.append(state)
        return StepPlan(after=3, job="job")

    run(small, choose, LONG, 0.03)
    decoding = [state for state in seen if state.batch]
    assert [state.inflight_ms for state in decoding[:3]] == pytest.approx([0.0, 3.0, 3.0])


def test_beside_slows_decode_only_as_long_as_it_runs(small: Device) -> None:
    # one tasklet of 1 ms at a quarter of the speed takes 4 ms; 6.1 ms beside against 4.1 ms alone
    steps = run(small, when_decoding(layout=SPLIT, beside=1), LONG, 0.1).steps
    assert steps.ms[0] == pytest.approx(4.0 + 4.1 * (1 - 4.0 / 6.1))


def test_what_outlasts_a_step_runs_on_next_to_the_following_one(small: Device) -> None:
    plans = iter([StepPlan(SPLIT, beside=2, job="job"), StepPlan(SPLIT)])
    steps = run(small, lambda state: next(plans, StepPlan()) if state.batch else StepPlan(), LONG, 0.1).steps
    left = 2.0 - 6.1 * 0.25
    assert steps.gap_ms[:2] == pytest.approx([6.1, left / 0.25 + 4.1 * (1 - left / 0.25 / 6.1)])


def test_a_step_of_another_layout_waits_for_what_outlasted(small: Device) -> None:
    plans = iter([StepPlan(SPLIT, beside=2, job="job"), StepPlan(WHOLE)])
    steps = run(small, lambda state: next(plans, StepPlan()) if state.batch else StepPlan(), LONG, 0.1).steps
    assert steps.gap_ms[1] == pytest.approx((2.0 - 6.1 * 0.25) / 0.5 + 4.1)


def test_after_waits_for_beside(small: Device) -> None:
    plans = iter([StepPlan(SPLIT, beside=2, after=1, job="job")])
    steps = run(small, lambda state: next(plans, StepPlan()) if state.batch else StepPlan(), LONG, 0.1).steps
    assert steps.gap_ms[:2] == pytest.approx([6.1, (2.0 - 6.1 * 0.25) / 0.5 + 1.0 + 4.1])


def test_with_nothing_to_decode_finetuning_goes_at_full_speed(small: Device) -> None:
    outcome = run(small, lambda state: StepPlan(after=5, job="job"), [], 1.2)
    assert outcome.summary().exclusive_share == pytest.approx(1.0, abs=0.01)
    assert outcome.trainer.tokens() == pytest.approx(1200 / 6 * 60, rel=0.01)


def test_a_request_waits_for_the_idle_portion_that_runs(small: Device) -> None:
    outcome = run(small, lambda state: StepPlan(after=0 if state.batch else 5, job="job"), [Arrival(0.011, 10, 3)], 0.1)
    assert outcome.finished[0].joined_ms == pytest.approx(15.0)


def test_drift_slows_decode_from_its_time_on(small: Device) -> None:
    steps = run(small, nothing, LONG, 0.2, drift=((0.1, 1.5),)).steps
    assert steps.ms[0] == pytest.approx(4.1)
    assert steps.ms[-1] == pytest.approx(4.1 * 1.5)


# ---- latencies ------------------------------------------------------------------------------------------------------


def test_tpot_of_a_request_prefilled_elsewhere_counts_from_when_it_joins(small: Device) -> None:
    outcome = run(small, nothing, [Arrival(0.0, 10, 5), Arrival(0.001, 10, 5)], 0.1)
    assert outcome.tpot_ms() == pytest.approx([(4.1 + 3 * 4.2) / 4, (3 * 4.2 + 4.1) / 4])
    assert outcome.summary().wait_p99_ms == pytest.approx(3.1)


def test_prefill_here_gives_a_first_token_time_and_stalls_decode(small: Device) -> None:
    outcome = run(small, nothing, [Arrival(0.0, 100, 50), Arrival(0.010, 300, 5)], 0.5, prefill="here")
    summary = outcome.summary()
    first, second = sorted(outcome.finished, key=lambda r: r.number)
    assert first.first_ms == pytest.approx(1.0)
    assert second.first_ms == pytest.approx(1.0 + 3 * 4.1 + 3.0)
    assert summary.stall_p99_ms == pytest.approx(3.0)
    assert summary.itl_p99_ms == pytest.approx(4.2)
    assert summary.ttft_p99_ms == pytest.approx(1.0 + 3 * 4.1 + 3.0 - 10.0)


def test_the_slack_of_a_tpot_target_is_what_the_tightest_request_has_left(small: Device) -> None:
    seen: list[float] = []

    def choose(state: StepState) -> StepPlan:
        seen.extend(state.slack_ms)
        return StepPlan()

    run(small, choose, LONG, 0.02, target_kind="tpot", target_ms=5.0)
    assert seen[:3] == pytest.approx([5.0, 5.0 + 0.9, 5.0 + 1.8])


def test_attainment_counts_tokens_and_steps_over_counts_steps(small: Device) -> None:
    plans = iter([StepPlan(after=3, job="job")] * 3)
    outcome = run(small, lambda state: next(plans, StepPlan()) if state.batch else StepPlan(), LONG, 0.1, target_ms=6.0)
    summary = outcome.summary()
    assert summary.steps_over == pytest.approx(3 / summary.steps)
    assert summary.attainment == pytest.approx(1 - 3 / summary.steps)


def test_figures_count_from_the_end_of_the_warm_up(small: Device) -> None:
    def early(state: StepState) -> StepPlan:
        return StepPlan(after=3, job="job") if state.inflight_ms == 0 and state.kv_tokens < 120 else StepPlan()

    whole, late = (run(small, early, LONG, 1.0, warmup_s=warmup).summary() for warmup in (0.0, 0.5))
    assert whole.finetune_tokens_s > 0
    assert late.finetune_tokens_s == 0
    assert late.seconds == pytest.approx(0.5, abs=0.01)
    assert late.steps < whole.steps
    assert late.itl_p99_ms == pytest.approx(4.1)
    with pytest.raises(Invalid, match="warmup_s is 2"):
        Scenario([], 1.0, 10.0, warmup_s=2)


# ---- plans that cannot be carried out --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (StepPlan(Layout("split", 5, 5), beside=1, job="job"), r"layout split\(5, 5\) does not exist"),
        (StepPlan(beside=1, job="job"), "beside in layout whole"),
        (StepPlan(after=1, job="other"), "job 'other' is not in state.jobs"),
        (StepPlan(after=1), "job None is not in state.jobs"),
        (StepPlan(after=10_000, job="job"), "more tasklets than the job showed"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused(small: Device, plan: StepPlan, said: str) -> None:
    with pytest.raises(Invalid, match=said):
        run(small, lambda state: plan if state.batch else StepPlan(), LONG, 0.1)


def test_a_plan_beyond_memory_is_refused() -> None:
    device = Device(small_profile(arena_pages=1000))
    with pytest.raises(Invalid, match=r"640 pages of memory, [0-9]+ are free"):
        run(device, when_decoding(after=1), [Arrival(0.0, 6000, 10)], 0.1)


def test_a_request_longer_than_the_kv_cache_is_named(small: Device) -> None:
    with pytest.raises(Invalid, match=r"request 2 of the trace has 900 \+ 200 tokens, the KV cache holds 1000"):
        run(small, nothing, [Arrival(0.0, 10, 10), Arrival(0.0, 900, 200)], 0.1, kv_tokens=1000)


@pytest.mark.parametrize("field", ["seconds", "target_ms", "max_running"])
def test_a_scenario_without_a_positive_figure_is_refused(field: str) -> None:
    figures = {"seconds": 1.0, "target_ms": 10.0, "max_running": 4, field: 0}
    with pytest.raises(Invalid, match=f"{field} is 0; give a number above zero"):
        Scenario([], **figures)  # type: ignore[arg-type]


# ---- memory ----------------------------------------------------------------------------------------------------------


def greedy(state: StepState) -> StepPlan:
    job = state.jobs[0] if state.jobs else None
    return StepPlan(after=2, job=job.job_id) if job and job.pages <= state.free_pages else StepPlan(pause=True)


def test_kv_cache_takes_pages_back_and_the_micro_batch_begins_again() -> None:
    device = Device(small_profile(arena_pages=1600))  # 25 blocks; finetuning holds 10, reserve 8
    arrivals = [Arrival(0.0, 1000, 300), Arrival(0.5, 16_000, 50)]
    outcome = run(device, greedy, arrivals, 3.0)
    assert len(outcome.finished) == 2
    assert outcome.summary().lost_ms > 0
    assert outcome.trainer.tokens() > 0


def test_too_many_kv_tokens_retract_the_newest_request(small: Device) -> None:
    arrivals = [Arrival(0.0, 400, 400), Arrival(0.001, 400, 400)]
    outcome = run(small, nothing, arrivals, 10.0, kv_tokens=1200)
    first, second = sorted(outcome.finished, key=lambda r: r.number)
    assert (first.retractions, second.retractions) == (0, 1)
    assert second.last_ms > first.last_ms


# ---- several jobs ----------------------------------------------------------------------------------------------------


def test_jobs_end_with_their_tokens_and_come_at_their_time(small: Device) -> None:
    jobs = (FinetuneJob("a", tokens=600), FinetuneJob("b", arrival_s=0.5, tokens=300))

    def first(state: StepState) -> StepPlan:
        return StepPlan(after=1, job=state.jobs[0].job_id) if state.jobs else StepPlan()

    outcome = run(small, first, [], 2.0, jobs=jobs)
    ended = {done.job.job_id: (done.trained_tokens, done.ended_ms) for done in outcome.trainer.done}
    assert ended["a"][0] == 600
    assert ended["b"][0] == 300
    assert ended["a"][1] == pytest.approx(60.0, abs=2.0)
    assert ended["b"][1] == pytest.approx(530.0, abs=2.0)


def test_another_job_inside_a_micro_batch_is_refused(small: Device) -> None:
    jobs = (FinetuneJob("a"), FinetuneJob("b"))
    turn = iter("aba")
    with pytest.raises(Invalid, match="job 'b' inside a step of 'a'"):
        run(small, lambda state: StepPlan(after=1, job=next(turn)), [], 1.0, jobs=jobs)


# ---- conservation, by property ---------------------------------------------------------------------------------------

ARRIVALS = st.lists(st.builds(Arrival, st.floats(0, 1.5), st.integers(1, 3000), st.integers(1, 80)), max_size=25).map(
    sorted
)


class Chaos:
    """Plans anything that can be carried out, and looks at each state."""

    def __init__(self, seed: int, device: Device, kv_limit: int) -> None:
        self.random = random.Random(seed)
        self.device, self.kv_limit = device, kv_limit
        self.planned = 0

    def __call__(self, state: StepState) -> StepPlan:
        blocks = -(-(state.kv_tokens + state.batch) // 1024)
        held = blocks * self.device.pages_per_block
        assert state.kv_tokens + state.batch <= self.kv_limit or not state.batch
        assert held + state.free_pages <= self.device.profile.arena_pages
        assert state.max_kv <= state.kv_tokens
        assert state.inflight_ms >= 0
        assert state.beside_ms >= 0
        job = self._job(state)
        if job is None:
            return StepPlan()
        count = self.random.randint(0, min(6, len(job.tasklets)))
        layout = self.random.choice(state.layouts) if state.batch else WHOLE
        beside = self.random.randint(0, count) if layout != WHOLE else 0
        self.planned += count
        return StepPlan(layout, beside, count - beside, job.job_id)

    def _job(self, state: StepState) -> JobView | None:
        jobs = state.jobs if state.jobs and state.jobs[0].boundary else state.jobs[:1]
        fitting = [job for job in jobs if job.pages <= state.free_pages]
        return self.random.choice(fitting) if fitting else None


@settings(max_examples=120, deadline=None)
@given(
    ARRIVALS, st.integers(0, 1000), st.integers(1, 8), st.integers(3100, 40_000), st.integers(640, 3200),
    st.sampled_from(["here", "elsewhere"]), st.sampled_from(["itl", "tpot"]), st.sampled_from([None, 120]),
)  # fmt: skip
def test_nothing_is_lost_whatever_is_planned(
    arrivals: list[Arrival], seed: int, max_running: int, kv_tokens: int, pages: int, prefill: str, kind: str,
    tokens: int | None,
) -> None:  # fmt: skip
    device = Device(small_profile(arena_pages=pages, tail=0.1))
    kv_limit = min(kv_tokens, device.kv_tokens)
    chaos = Chaos(seed, device, kv_limit)
    outcome = run(
        device, chaos, arrivals, 2.0, seed=seed, max_running=max_running, kv_tokens=kv_tokens, prefill=prefill,
        target_kind=kind, jobs=(FinetuneJob("a", tokens=tokens), FinetuneJob("b", tenant="other")),
    )  # fmt: skip
    came = sum(a.time_s <= outcome.seconds for a in arrivals)
    assert outcome.arrived == len(outcome.finished) + outcome.running + outcome.waiting
    assert came <= outcome.arrived + 1
    assert len({r.number for r in outcome.finished}) == len(outcome.finished)
    for request in outcome.finished:
        given_arrival = arrivals[request.number]
        assert request.emitted == request.output_tokens == given_arrival.output_tokens
        assert request.arrival_s * 1e3 <= request.first_ms <= request.last_ms
    # each running request has one token a step; first tokens come with the request or from prefill
    assert sum(outcome.steps.batch) >= sum(r.output_tokens - 1 for r in outcome.finished)
    trained = [*outcome.trainer.runs, *outcome.trainer.done]
    assert chaos.planned == outcome.trainer.tasklets
    launched = sum(run.trained_tokens for run in trained) / 60 * 6 + sum(run.work_ms for run in outcome.trainer.runs)
    assert launched + sum(run.lost_ms for run in trained) == pytest.approx(chaos.planned)
    assert outcome.trainer.held_pages == sum(run.pages for run in outcome.trainer.runs) <= pages


@settings(max_examples=15, deadline=None)
@given(ARRIVALS, st.integers(0, 1000))
def test_all_requests_finish_when_there_is_time(arrivals: list[Arrival], seed: int) -> None:
    device = Device(small_profile(tail=0.1))
    outcome = run(device, greedy, arrivals, 60.0, seed=seed)
    assert len(outcome.finished) == len(arrivals)
    assert sum(outcome.steps.batch) == sum(a.output_tokens - 1 for a in arrivals)


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    device = Device(small_profile(tail=0.1))
    arrivals = [Arrival(0.01 * n, 50, 40) for n in range(20)]
    runs = [run(device, bind("tasklet_slices"), arrivals, 2.0, seed=seed) for seed in (1, 1, 2)]
    assert runs[0].steps == runs[1].steps
    assert runs[0].summary() == runs[1].summary()
    assert runs[0].steps.ms != runs[2].steps.ms
