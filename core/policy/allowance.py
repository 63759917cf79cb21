"""Tokens that may be late on purpose, so that a tasklet longer than every slack makes progress.

A p99 target leaves 1 % of the tokens; an allowance is a small share of that. Decoded tokens earn it, a step that runs
over spends its batch, and no more than one such step can be saved up, so the late share never exceeds the allowance by
more than one step.
"""

from __future__ import annotations

from core.policy.types import StepState


def earned(credit: float, state: StepState, allowance: float) -> float:
    """The credit in tokens with this step's added."""
    return min(credit + allowance * state.batch, state.batch)


def spent(credit: float, state: StepState) -> float | None:
    """The credit after a step that is late, None when there is not enough."""
    return credit - state.batch if state.batch and credit >= state.batch else None
