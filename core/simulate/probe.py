"""The recorded H200 probe, run again on the simulated device: what the simulator is judged by.

The probe decoded one fixed batch back to back. It kept two tasklets queued on the finetune part all the time, and put
the next tasklets of a second micro-batch behind each step, on the whole device, as long as they fitted the target less
the step's own latency. It began each row with fresh micro-batches, and stayed before the first tasklet that never fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from core.policy.types import WHOLE, Layout
from core.simulate.device import Device, Program

_CONTEXT = 1024
_SECONDS = 1.2
_GUARD_MS = 0.3  # the probe planned with the step's p99 less this


@dataclass(frozen=True, slots=True)
class ProbeRow:
    """One recorded row beside its simulation; `decode_sms` 0 is the whole device, tokens are finetune tokens/s."""

    batch: int
    decode_sms: int
    target_ms: float
    p50_ms: float
    tokens_s: float
    simulated_p50_ms: float
    simulated_tokens_s: float
    exclusive_tokens_s: float

    @property
    def p50_error(self) -> float:
        return self.simulated_p50_ms / self.p50_ms - 1

    @property
    def tokens_error(self) -> float:
        """Relative; for rows below 1 % of exclusive speed relative to that, since they are one tasklet or none."""
        return (self.simulated_tokens_s - self.tokens_s) / max(self.tokens_s, 0.01 * self.exclusive_tokens_s)

    @property
    def worst_error(self) -> float:
        return max(abs(self.p50_error), abs(self.tokens_error))


def probe_rows(device: Device, recorded: dict[str, Any], seed: int = 0) -> list[ProbeRow]:
    """Every row of the recording (``hybrid`` of the probe's JSON), simulated."""
    layouts = {layout.decode_sms: layout for layout in device.layouts if layout.kind == "split"}
    exclusive = float(recorded["ft_full"])
    rows = []
    for batch, found in recorded["hybrid"].items():
        for row in found:
            layout = layouts[row["dec"]] if row["dec"] else WHOLE
            p50, tokens = _run(device, layout, int(batch), float(row["slo"]), seed)
            rows.append(
                ProbeRow(int(batch), row["dec"] or 0, row["slo"], row["p50"], row["ft"], p50, tokens, exclusive)
            )
    return rows


def _run(device: Device, layout: Layout, batch: int, target_ms: float, seed: int) -> tuple[float, float]:
    """p50 of the step (ms) and finetune tokens/s of one row."""
    program = Program(device)
    cell = device.cell(layout, device.padded(batch), batch * _CONTEXT, _CONTEXT)
    random, spread = np.random.default_rng(seed), device.noise(1000)
    if layout == WHOLE:
        decode, tail, speed = cell.alone_ms, cell.alone_tail, 0.0
        budget = target_ms - decode
        behind, beside = device.alone_speed(WHOLE), 0.0
    else:
        decode, tail, speed = cell.beside_ms, cell.beside_tail, cell.speed
        budget = target_ms - max(decode, decode * (1 + tail) - _GUARD_MS)
        behind, beside = device.sharing(layout)
    now, work, at, steps = 0.0, 0.0, 0, []
    while now < _SECONDS * 1e3:
        used = 0.0
        while used + program.ms[at % len(program)] <= budget:
            used += program.ms[at % len(program)]
            at += 1
        step = decode * (1 + tail * spread[int(random.integers(1000))])
        after = used / behind
        steps.append(step + after)
        now += step + after
        work += used + speed * step + beside * after
    return median(steps), work / program.total_ms * program.tokens / now * 1e3
