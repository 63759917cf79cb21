"""Policies by name. `bind("tasklet_slices", allowance=0.002)` gives an object with ``MEMORY`` and
``plan(state, predictor, memory) -> (StepPlan, memory)``; the knobs of a policy are the fields of its ``Knobs``."""

from __future__ import annotations

from core.policy import solo, tasklet_slices
from core.policy.bound import BoundPolicy, bind_module

POLICIES = {
    "solo": solo,
    "tasklet_slices": tasklet_slices,
}


def bind(name: str, **knobs: object) -> BoundPolicy:
    """The policy `name` with its knobs set; raises KeyError for an unknown name, TypeError for an unknown knob."""
    return bind_module(name, POLICIES[name], knobs)


__all__ = ["POLICIES", "BoundPolicy", "bind"]
