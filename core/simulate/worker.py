"""``python -m core.simulate.worker``: answers what-if questions, one JSON document a line, until its input ends.

A process of its own: the simulator computes for seconds, and whoever asks (the API) must go on serving meanwhile. A
question is a `Question`, an answer ``{"frontier": ...}`` or ``{"error": {"code", "message", "param"}}``. It leaves
when nothing was asked for five minutes.
"""

from __future__ import annotations

import json
import os
import select
import sys
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from core.errors import HarliError, Invalid
from core.policy.types import TaskletKind
from core.simulate.command import Load, Simulated, machine, whatif
from core.simulate.learnt import Learnt, LearntMachine

_IDLE_S = 300.0


class Question(BaseModel):
    """`profile`: the path of what was measured on the machine, with what it leaves open; or else, from `device` on,
    what its engine has learnt. margin: the share of a target that the engine does not plan with."""

    model_config = ConfigDict(extra="forbid")

    batch: int
    kv_tokens: int
    targets_ms: list[float]
    now_ms: float | None = None
    policy: str
    margin: float
    profile: str | None = None
    layers: int = 32
    micro_batch_tokens: int = 2048
    kv_bytes_per_token: int = 131_072
    device: str = ""
    model: str = ""
    steps: list[tuple[int, float, float]] = []
    tasklets: dict[TaskletKind, tuple[float, float]] = {}
    mix: dict[TaskletKind, float] = {}
    step_tokens: float = 0.0


def answer(question: Question) -> dict[str, Any]:
    """The frontier at the question's load. Errors: those of `whatif`."""
    simulated: Simulated
    if question.profile is not None:
        simulated = machine(question.profile, question.layers, question.micro_batch_tokens, question.kv_bytes_per_token)
    else:
        learnt = Learnt(
            question.device, question.model, question.steps, question.tasklets, question.mix, question.step_tokens
        )
        simulated = LearntMachine(learnt, question.batch, question.kv_tokens)
    found = whatif(
        Load(question.batch, question.kv_tokens), simulated, question.targets_ms, policy_name=question.policy,
        now_ms=question.now_ms, margin=question.margin,
    )  # fmt: skip
    return {"frontier": asdict(found)}


def main() -> None:
    os.nice(19)  # decode may share this machine's cores
    while select.select([sys.stdin], [], [], _IDLE_S)[0]:
        line = sys.stdin.readline()
        if not line:
            return
        try:
            reply = answer(Question.model_validate_json(line))
        except ValidationError as error:
            reply = _refusal(Invalid("question", f"the question cannot be read: {error.errors()[0]['msg']}"))
        except HarliError as error:
            reply = _refusal(error)
        print(json.dumps(reply), flush=True)


def _refusal(error: HarliError) -> dict[str, Any]:
    return {"error": {"code": error.code, "message": error.message, "param": error.param}}


if __name__ == "__main__":
    main()
