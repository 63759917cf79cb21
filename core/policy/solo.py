"""No finetuning: decode has the device to itself. The baseline, and what every other policy falls back to."""

from __future__ import annotations

from core.policy.types import Predictor, StepPlan, StepState

MEMORY = None
_PLAN = StepPlan(reason="solo")


def plan(state: StepState, predictor: Predictor, memory: None) -> tuple[StepPlan, None]:
    """Always the solo plan."""
    return _PLAN, None
