"""Whose turn it is: weighted fair shares of finetune tokens between tenants.

Deficit round robin over tokens. A tenant's turn adds a quantum times its weight to its account, its planned tokens are
taken from it, and the turn ends at the first optimizer-step boundary at which the account is used up. What a long
optimizer step overdraws is paid back in the next rounds, so over time each tenant that has work gets tokens in
proportion to its weight, and none waits for more than one turn of each of the others per round: starving one is
impossible as long as its weight is above zero. Within a tenant the highest priority goes first, then the nearest
deadline, then the order of the state; a tenant orders its own jobs and cannot move another's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from core.policy.types import JobView, StepState


@dataclass(frozen=True, slots=True)
class Shares:
    """accounts: (tenant, tokens) in the order of the ring; serving: the tenant whose turn it is."""

    accounts: tuple[tuple[str, float], ...] = ()
    serving: str = ""


NO_SHARES = Shares()


def _rank(job: JobView) -> tuple[int, float]:
    return -job.priority, inf if job.deadline_s is None else job.deadline_s


def next_job(state: StepState, shares: Shares, quantum_tokens: float) -> tuple[JobView | None, Shares]:
    """The job that this step may launch tasklets of, None when the memory for it is not there.

    Within an optimizer step that is the open job; at its end the turn may pass on. A state with jobs of one tenant only
    needs no accounts.
    """
    first, free = state.jobs[0], state.free_pages
    if not first.boundary or len(state.jobs) == 1:
        return (first if first.pages <= free else None), (shares if len(state.jobs) > 1 else NO_SHARES)
    best: dict[str, JobView] = {}
    for job in state.jobs:
        if job.pages <= free and (job.tenant not in best or _rank(job) < _rank(best[job.tenant])):
            best[job.tenant] = job
    if not best:
        return None, shares
    if len(best) == 1:
        (job,) = best.values()
        return job, replace(shares, serving=job.tenant)
    shares = _pass_turn({tenant: job.weight for tenant, job in best.items()}, shares, quantum_tokens)
    return best[shares.serving], shares


def charge(shares: Shares, job: JobView, tasklets: int) -> Shares:
    """Take the tokens of planned tasklets from the account of the job's tenant."""
    if not tasklets or not shares.accounts:
        return shares
    tokens = tasklets * job.tokens_per_tasklet
    accounts = tuple((t, left - tokens) if t == job.tenant else (t, left) for t, left in shares.accounts)
    return Shares(accounts, shares.serving)


def _pass_turn(weights: dict[str, float], shares: Shares, quantum: float) -> Shares:
    """The next turn among the tenants in `weights`, who all have a job that can run."""
    left = {tenant: tokens for tenant, tokens in shares.accounts if tenant in weights or tokens < 0}
    left.update((tenant, 0.0) for tenant in weights if tenant not in left)
    serving = shares.serving
    if serving not in weights or left[serving] <= 0:
        gain = {tenant: quantum * weights.get(tenant, 1.0) for tenant in left}
        rounds = min(-left[tenant] // gain[tenant] for tenant in weights)  # in which nobody would get above zero
        left = {tenant: tokens + rounds * gain[tenant] for tenant, tokens in left.items()}
        ring = list(left)
        start = ring.index(serving) + 1 if serving in left else 0
        for tenant in ring[start:] + ring[:start]:
            left[tenant] += gain[tenant]
            if tenant in weights and left[tenant] > 0:
                serving = tenant
                break
    accounts = tuple((tenant, tokens) for tenant, tokens in left.items() if tenant in weights or tokens < 0)
    return Shares(accounts, serving)
