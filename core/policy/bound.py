"""A policy whose knobs are fixed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from core.policy.types import Predictor, StepPlan, StepState

Plan = Callable[[StepState, Predictor, Any], tuple[StepPlan, Any]]


@dataclass(frozen=True)
class BoundPolicy:
    """What an engine or a simulator runs: start with `MEMORY`, call `plan` each step with the memory it gave last.

    knobs: the policy's ``Knobs`` record, None for a policy that has none.
    """

    name: str
    knobs: Any
    MEMORY: Any
    plan: Plan


def bind_module(name: str, module: ModuleType, knobs: Mapping[str, object]) -> BoundPolicy:
    """Bind a policy module; a module without ``Knobs`` takes none."""
    if not hasattr(module, "Knobs"):
        if knobs:
            raise TypeError(f"policy {name} has no knobs, got {', '.join(knobs)}")
        return BoundPolicy(name, None, module.MEMORY, module.plan)
    record = module.Knobs(**knobs)
    return BoundPolicy(name, record, module.MEMORY, partial(module.plan, knobs=record))
