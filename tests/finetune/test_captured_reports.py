"""Where the ends of captured programs are told: page-locked places that are used again. On a device that does all at
once; how a real one writes them is tested on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.finetune.captured import StepResult
from tests.finetune import small
from tests.finetune.cpu_slot import CpuSlot, on_a_cpu

pytestmark = pytest.mark.usefixtures(on_a_cpu.__name__)


def launch(slot: CpuSlot, steps: int) -> None:
    """So many different optimizer steps, from the same weights on."""
    slot.load_job({}, scaling=1.0, weight_decay=0.0, max_grad_norm=1.0)
    for batch in slot.batches(steps):
        for index in range(len(slot.load_step([batch], 1e-3))):
            slot.launch(0, index)


def test_each_program_that_nobody_has_asked_about_has_a_report_of_its_own(tmp_path: Path) -> None:
    slot = CpuSlot(small.model(), tmp_path, None)
    expected: list[StepResult] = []
    slot.load_job({}, scaling=1.0, weight_decay=0.0, max_grad_norm=1.0)
    for batch in slot.batches(3):
        for index in range(len(slot.load_step([batch], 1e-3))):
            slot.launch(0, index)
        expected += slot.results()
    assert len({result.loss for result in expected}) == 3
    assert len(slot._reports) == 1
    launch(slot, 3)
    assert slot.results() == expected
    places = {id(report) for report in slot._reports}
    launch(slot, 2)
    launch(slot, 3)  # another job, before anybody asked about the one before
    assert slot.results() == expected
    assert len(places) == 3 and {id(report) for report in slot._reports} == places
