"""How many of a GPU's SMs are busy, by NVML's GPM; plain NVML utilisation reads near 100 % for any kernel.

A look takes up to some milliseconds, so a thread of its own takes it, and nobody waits for that.
"""

from __future__ import annotations

import threading
from typing import Any

import pynvml

_EVERY_S = 0.5


class SmUse:
    """`share` of the SMs that were busy between the last two looks, 0 to 1; None where the device or its driver cannot
    tell, and before the second look."""

    def __init__(self, index: int, nvml: Any = pynvml) -> None:
        self.share: float | None = None
        self._nvml = nvml
        self._device = None
        try:
            nvml.nvmlInit()
            device = nvml.nvmlDeviceGetHandleByIndex(index)
            if nvml.nvmlGpmQueryDeviceSupport(device).isSupportedDevice:
                self._device = device
                self._samples = [nvml.nvmlGpmSampleAlloc() for _ in range(2)]
                nvml.nvmlGpmSampleGet(device, self._samples[0])
        except nvml.NVMLError:
            self._device = None

    def start(self) -> None:
        """Look twice a second from now on, where that is possible."""
        if self._device is not None:
            threading.Thread(target=self._go_on, name="harli-sm-use", daemon=True).start()

    def look(self) -> None:
        """Take `share` of the time since the last look. Raises NVMLError."""
        nvml, (before, now) = self._nvml, self._samples
        nvml.nvmlGpmSampleGet(self._device, now)
        asked = nvml.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, 1
        asked.sample1, asked.sample2 = before, now
        asked.metrics[0].metricId = nvml.NVML_GPM_METRIC_SM_UTIL
        nvml.nvmlGpmMetricsGet(asked)
        self.share = min(1.0, max(0.0, asked.metrics[0].value / 100))
        self._samples = [now, before]

    def _go_on(self) -> None:
        pause = threading.Event()
        while not pause.wait(_EVERY_S):
            try:
                self.look()
            except self._nvml.NVMLError:
                self.share = None
                return
