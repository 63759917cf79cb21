"""Learning-rate schedules."""

from __future__ import annotations

import pytest
import torch
from transformers import get_scheduler

from core.finetune.schedule import Kind, factor


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_without_warm_up_it_is_that_of_transformers(kind: Kind) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_scheduler(kind, optimizer, num_warmup_steps=0, num_training_steps=10)
    for step in range(10):
        assert factor(kind, step, 10, 0) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


def test_warm_up_rises_from_above_zero_to_the_peak() -> None:
    assert [factor("constant", step, 10, 3) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_decay_ends_near_zero() -> None:
    assert factor("cosine", 99, 100, 5) < 0.01
