"""What a policy is fed: the engine tells it the same things as the simulator that it is judged by."""

from __future__ import annotations

import ast
import inspect
from dataclasses import fields

from core.policy.types import StepState
from core.runtime import runtime
from core.simulate import engine


def fed(module: object) -> set[str]:
    """Fields of the one `StepState` that a module makes, given by place or by name."""
    calls = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(module)))  # type: ignore[arg-type]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "StepState"
    ]
    (call,) = calls
    names = [field.name for field in fields(StepState)]
    return {*names[: len(call.args)], *(keyword.arg or "" for keyword in call.keywords)}


def test_engine_and_simulator_feed_every_field() -> None:
    assert fed(runtime) == fed(engine) == {field.name for field in fields(StepState)}
