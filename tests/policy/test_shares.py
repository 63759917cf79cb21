"""Fair shares of finetune tokens between tenants."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.policy import POLICIES, bind
from core.policy.shares import NO_SHARES, Shares, charge, next_job
from core.policy.types import JobView
from tests.policy.clockwork import KINDS, LAYOUTS, Clockwork, state

QUANTUM = 1000.0


def job(tenant: str, **changes: object) -> JobView:
    fields = {"job_id": tenant, "tasklets": KINDS, "tenant": tenant, "tokens_per_tasklet": 10.0, "boundary": True}
    return JobView(**{**fields, **changes})  # type: ignore[arg-type]


def serve(weights: dict[str, float], step_tokens: dict[str, int], turns: int) -> tuple[dict[str, float], list[str]]:
    """Optimizer steps until `turns` of them are done; tokens per tenant and the order of turns."""
    shares, served, order = NO_SHARES, dict.fromkeys(weights, 0.0), []
    jobs = {tenant: job(tenant, weight=weight, tokens_per_tasklet=1.0) for tenant, weight in weights.items()}
    last = next(iter(jobs))
    for _ in range(turns):
        ring = (jobs[last], *(view for tenant, view in jobs.items() if tenant != last))
        chosen, shares = next_job(state(jobs=ring), shares, QUANTUM)
        assert chosen is not None
        last = chosen.tenant
        served[last] += step_tokens[last]
        order.append(last)
        shares = charge(shares, chosen, step_tokens[last])
    return served, order


def test_tenants_get_tokens_in_proportion_to_their_weights() -> None:
    served, _ = serve({"a": 1.0, "b": 3.0}, {"a": 700, "b": 700}, turns=2000)
    assert 2.9 <= served["b"] / served["a"] <= 3.1


def test_long_optimizer_steps_do_not_win_more() -> None:
    served, _ = serve({"short": 1.0, "long": 1.0}, {"short": 100, "long": 9000}, turns=5000)
    assert 0.95 <= served["long"] / served["short"] <= 1.05


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.05, 20), st.integers(1, 20_000)), min_size=2, max_size=6),
    st.integers(0, 3),
)
def test_no_tenant_with_work_is_left_out_and_the_shares_are_fair(tenants: list[tuple[float, int]], seed: int) -> None:
    weights = {f"t{n}": weight for n, (weight, _) in enumerate(tenants)}
    tokens = {f"t{n}": size for n, (_, size) in enumerate(tenants)}
    served, _ = serve(weights, tokens, turns=600 + seed)
    rounds = {tenant: served[tenant] / weights[tenant] for tenant in weights}  # tokens per unit of weight
    for tenant, own in rounds.items():
        for other, theirs in rounds.items():
            # at any time two tenants are apart by at most a turn and an optimizer step of each
            slop = 2 * QUANTUM + tokens[tenant] / weights[tenant] + tokens[other] / weights[other]
            assert abs(own - theirs) <= slop


def test_a_job_inside_its_optimizer_step_goes_on() -> None:
    jobs = (job("a", boundary=False), job("b", priority=9))
    chosen, _ = next_job(state(jobs=jobs), Shares((("a", -5000.0), ("b", 0.0)), "a"), QUANTUM)
    assert chosen is jobs[0]


def test_within_a_tenant_priority_goes_before_deadline_before_order() -> None:
    jobs = (
        job("a", job_id="late", deadline_s=90.0), job("a", job_id="soon", deadline_s=10.0), job("a", job_id="none"),
        job("b", job_id="b"),
    )  # fmt: skip
    chosen, _ = next_job(state(jobs=jobs), NO_SHARES, QUANTUM)
    assert chosen is not None and chosen.job_id == "soon"
    urgent = (*jobs, job("a", job_id="urgent", priority=1))
    chosen, _ = next_job(state(jobs=urgent), NO_SHARES, QUANTUM)
    assert chosen is not None and chosen.job_id == "urgent"


def test_priority_does_not_reach_over_to_another_tenant() -> None:
    jobs = (job("a", priority=100), job("b"))
    shares, tenants = NO_SHARES, []
    for _ in range(10):
        chosen, shares = next_job(state(jobs=jobs), shares, QUANTUM)
        assert chosen is not None
        tenants.append(chosen.tenant)
        shares = charge(shares, chosen, 200)
        jobs = (chosen, *(view for view in jobs if view is not chosen))
    assert tenants.count("a") == tenants.count("b") == 5


def test_a_tenant_that_comes_later_has_no_credit_from_before() -> None:
    shares = Shares((("a", 400.0),), "a")
    jobs = (job("a"), job("new"))
    chosen, shares = next_job(state(jobs=jobs), shares, QUANTUM)
    assert chosen is not None and chosen.tenant == "a"
    assert dict(shares.accounts)["new"] == 0.0


def test_a_debt_is_kept_while_a_tenant_is_away_and_a_credit_is_not() -> None:
    shares = Shares((("a", -300.0), ("b", 200.0), ("c", 100.0)), "c")
    _, shares = next_job(state(jobs=(job("c"), job("d"))), shares, QUANTUM)
    assert "b" not in dict(shares.accounts) and dict(shares.accounts)["a"] == -300.0


def test_a_job_that_does_not_fit_into_memory_lets_another_go_first() -> None:
    jobs = (job("a", pages=50), job("b", pages=5))
    chosen, _ = next_job(state(jobs=jobs, free_pages=10), NO_SHARES, QUANTUM)
    assert chosen is jobs[1]
    chosen, _ = next_job(state(jobs=jobs, free_pages=1), NO_SHARES, QUANTUM)
    assert chosen is None


@pytest.mark.parametrize("name", [name for name in sorted(POLICIES) if name != "solo"])
@settings(max_examples=8, deadline=None)
@given(st.lists(st.floats(0.2, 5.0), min_size=2, max_size=4), st.lists(st.booleans(), min_size=1, max_size=7))
def test_under_every_policy_every_tenant_gets_its_share_whatever_decodes(
    name: str, weights: list[float], idle: list[bool]
) -> None:
    policy, device, tokens = bind(name, quantum_tokens=QUANTUM), Clockwork(), 100.0
    memory, at = policy.MEMORY, [0] * len(weights)
    served = [0.0] * len(weights)
    first = 0
    for turn in range(1500):
        jobs = [
            job(f"t{n}", weight=weight, tasklets=KINDS[at[n] :], tokens_per_tasklet=tokens, boundary=at[n] == 0)
            for n, weight in enumerate(weights)
        ]
        ring = (jobs[first], *(view for n, view in enumerate(jobs) if n != first))
        batch = 0 if idle[turn % len(idle)] else 8
        now = state(jobs=ring, batch=batch, padded=batch, slack_ms=(60.0,) if batch else (), layouts=LAYOUTS)
        plan, memory = policy.plan(now, device, memory)
        done = plan.beside + plan.after
        if done:
            first = int(str(plan.job)[1:])
            at[first] = (at[first] + done) % len(KINDS)
            served[first] += done * tokens
    step = tokens * len(KINDS)
    assert sum(served) > 10 * (QUANTUM + step)
    rounds = [own / weight for own, weight in zip(served, weights, strict=True)]
    for own, weight in zip(rounds, weights, strict=True):
        assert max(rounds) - own <= 2 * QUANTUM + step / weight + step / min(weights)
