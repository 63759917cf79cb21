"""The simulator against measurement: every recorded row of the H200 probe within 15 %."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from core.simulate.device import Device
from core.simulate.probe import ProbeRow, probe_rows
from core.simulate.profile import read_profile

RECORDED = json.loads((Path(__file__).parents[2] / "benchmarks/data/h200_hybrid_probe.json").read_text())
DEVICE = Device(read_profile("h200"))


@pytest.mark.parametrize("seed", [0, 1])
def test_every_recorded_row_is_met(seed: int) -> None:
    rows = probe_rows(DEVICE, RECORDED, seed)
    assert len(rows) == sum(len(found) for found in RECORDED["hybrid"].values()) == 92
    worst = max(rows, key=lambda row: row.worst_error)
    assert worst.worst_error <= 0.15, worst


def test_the_median_row_is_met_much_closer() -> None:
    errors = sorted(row.worst_error for row in probe_rows(DEVICE, RECORDED))
    assert errors[len(errors) // 2] < 0.05


def test_rows_of_one_tasklet_or_none_are_judged_against_exclusive_speed() -> None:
    row = ProbeRow(32, 0, 8.0, 6.46, 1.0, 6.4, 80.0, 15_765.0)
    assert row.tokens_error == pytest.approx(79 / 157.65)
