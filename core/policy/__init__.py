"""Policies by name. `bind("hybrid", gain=0.1)` gives an object with ``MEMORY`` and
``plan(state, predictor, memory) -> (StepPlan, memory)``; the knobs of a policy are the fields of its ``Knobs``."""

from __future__ import annotations

from core.policy import (
    chunked,
    harli,
    harli_hysteresis,
    hybrid,
    solo,
    static,
    step_slices,
    tasklet_slices,
)
from core.policy.bound import BoundPolicy, bind_module

POLICIES = {
    "solo": solo,
    "static": static,
    "step_slices": step_slices,
    "chunked": chunked,
    "tasklet_slices": tasklet_slices,
    "harli": harli,
    "harli_hysteresis": harli_hysteresis,
    "hybrid": hybrid,
}


def bind(name: str, **knobs: object) -> BoundPolicy:
    """The policy `name` with its knobs set; raises KeyError for an unknown name, TypeError for an unknown knob."""
    return bind_module(name, POLICIES[name], knobs)


__all__ = ["POLICIES", "BoundPolicy", "bind"]
