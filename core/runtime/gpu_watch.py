"""What NVML tells of a GPU while an engine runs on it: how many of its SMs are busy, the power that it draws, and that
the clock of its SMs has changed.

Busy SMs are GPM's; plain NVML utilisation reads near 100 % for any kernel. A look takes up to some milliseconds, so a
thread of its own takes it, and nobody waits for that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pynvml

_EVERY_S = 0.5
# An idle GPU lowers its clock, which says nothing of how fast it works: at least this percentage of the time it did.
_WORKING = 50
# Boost moves the clock by a few percent with every change of load.
_CHANGE = 0.1
# Looks in a row that have to tell of a change: the first one may fall into the ramp to it.
_LOOKS = 2


class GpuWatch:
    """`share` of the SMs that were busy between the last two looks, 0 to 1, and `power_w`, the watts that the whole
    device drew meanwhile; None where the device or its driver cannot tell, and before the second look."""

    def __init__(self, index: int, nvml: Any = pynvml, clock: Callable[[], float] = time.monotonic) -> None:
        self.share: float | None = None
        self.power_w: float | None = None
        self._nvml, self._clock = nvml, clock
        self._energy: tuple[float, float] | None = None  # seconds and joules of the last look
        self._device = None
        self._samples: list[Any] = []
        self._clock_mhz = 0
        self._odd = 0
        self._change = ""
        with suppress(nvml.NVMLError):
            nvml.nvmlInit()
            device = nvml.nvmlDeviceGetHandleByIndex(index)
            if nvml.nvmlGpmQueryDeviceSupport(device).isSupportedDevice:
                self._samples = [nvml.nvmlGpmSampleAlloc() for _ in range(2)]
                nvml.nvmlGpmSampleGet(device, self._samples[0])
            self._device = device

    def start(self) -> None:
        """Look twice a second from now on, where that is possible."""
        if self._device is not None:
            threading.Thread(target=self._go_on, name="harli-gpu-watch", daemon=True).start()

    def look(self) -> None:
        """Take `share` and `power_w` of the time since the last look, and the SMs' clock. Raises NVMLError."""
        if self._samples:
            self._take_share()
        self._take_power()
        self._take_clock()

    def take_change(self) -> str:
        """What the clock did since the last call, for people; empty when it stayed."""
        change, self._change = self._change, ""
        return change

    def _take_share(self) -> None:
        nvml, (before, now) = self._nvml, self._samples
        nvml.nvmlGpmSampleGet(self._device, now)
        asked = nvml.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, 1
        asked.sample1, asked.sample2 = before, now
        asked.metrics[0].metricId = nvml.NVML_GPM_METRIC_SM_UTIL
        nvml.nvmlGpmMetricsGet(asked)
        self.share = min(1.0, max(0.0, asked.metrics[0].value / 100))
        self._samples = [now, before]

    def _take_power(self) -> None:
        """By the energy that was used, where it is counted: what is drawn at a moment says little of half a second."""
        nvml, now = self._nvml, self._clock()
        try:
            joules = nvml.nvmlDeviceGetTotalEnergyConsumption(self._device) / 1e3
        except nvml.NVMLError:
            self.power_w = self._present_power()
            return
        if self._energy is not None and now > self._energy[0]:
            since, before = self._energy
            self.power_w = (joules - before) / (now - since)
        self._energy = now, joules

    def _present_power(self) -> float | None:
        try:
            return float(self._nvml.nvmlDeviceGetPowerUsage(self._device)) / 1e3
        except self._nvml.NVMLError:
            return None

    def _take_clock(self) -> None:
        nvml = self._nvml
        if nvml.nvmlDeviceGetUtilizationRates(self._device).gpu < _WORKING:
            return
        mhz = nvml.nvmlDeviceGetClockInfo(self._device, nvml.NVML_CLOCK_SM)
        if self._clock_mhz and abs(mhz - self._clock_mhz) <= _CHANGE * self._clock_mhz:
            self._odd = 0
            return
        self._odd += 1
        if self._odd == _LOOKS:
            if self._clock_mhz:
                self._change = f"the SMs' clock went from {self._clock_mhz} to {mhz} MHz"
            self._clock_mhz, self._odd = mhz, 0

    def _go_on(self) -> None:
        pause = threading.Event()
        while not pause.wait(_EVERY_S):
            try:
                self.look()
            except self._nvml.NVMLError:
                self.share = self.power_w = None
                return
