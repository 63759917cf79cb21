"""What an optimizer step is made of."""

from __future__ import annotations

import pytest

from core.policy.types import TaskletKind
from core.runtime.work import Work


def run(work: Work, *kinds: TaskletKind) -> None:
    for kind in kinds:
        work.ran(kind, 64.0)


def test_figures_are_of_whole_steps() -> None:
    work = Work()
    run(work, "forward", "head")
    assert (work.steps, work.mix, work.step_tokens) == (0, {}, 0.0)
    run(work, "backward", "optimizer")
    run(work, "forward", "forward", "head", "backward", "optimizer", "forward")
    assert work.steps == 2
    assert work.mix == {"forward": 1.5, "head": 1.0, "backward": 1.0, "optimizer": 1.0}
    assert work.step_tokens == pytest.approx(64.0 * 9 / 2)
