"""Facts about what a GPU is said to do: how busy it is, and that its clock has changed."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from core.runtime.gpu_watch import GpuWatch
from core.runtime.report import busy_share

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


class Nvml:
    """A driver whose counter of busy SMs and clock the test moves; NVML's own structures."""

    NVMLError = pynvml.NVMLError
    NVML_GPM_METRICS_GET_VERSION = pynvml.NVML_GPM_METRICS_GET_VERSION
    NVML_GPM_METRIC_SM_UTIL = pynvml.NVML_GPM_METRIC_SM_UTIL
    NVML_CLOCK_SM = pynvml.NVML_CLOCK_SM
    c_nvmlGpmMetricsGet_t = pynvml.c_nvmlGpmMetricsGet_t

    def __init__(self, supported: bool = True) -> None:
        self._supported, self.counter = supported, 0.0
        self.mhz, self.working = 1980, 100
        self.millijoules: int | None = 5_000_000
        self.milliwatts: int | None = 700_000
        self._seen: dict[int, float] = {}

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return index

    def nvmlGpmQueryDeviceSupport(self, device: int) -> Any:
        return SimpleNamespace(isSupportedDevice=int(self._supported))

    def nvmlGpmSampleAlloc(self) -> Any:
        return pynvml.c_nvmlGpmSample_t(pynvml.struct_c_nvmlGpmSample_t())

    def nvmlGpmSampleGet(self, device: int, sample: Any) -> None:
        self._seen[pynvml.addressof(sample.contents)] = self.counter

    def nvmlDeviceGetUtilizationRates(self, device: int) -> Any:
        return SimpleNamespace(gpu=self.working)

    def nvmlDeviceGetClockInfo(self, device: int, kind: int) -> int:
        assert kind == pynvml.NVML_CLOCK_SM
        return self.mhz

    def nvmlDeviceGetTotalEnergyConsumption(self, device: int) -> int:
        return self._told(self.millijoules)

    def nvmlDeviceGetPowerUsage(self, device: int) -> int:
        return self._told(self.milliwatts)

    def _told(self, value: int | None) -> int:
        if value is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return value

    def nvmlGpmMetricsGet(self, asked: Any) -> None:
        assert (asked.version, asked.numMetrics, asked.metrics[0].metricId) == (1, 1, 2)
        before, now = (self._seen[pynvml.addressof(s.contents)] for s in (asked.sample1, asked.sample2))
        asked.metrics[0].value = now - before


def test_the_share_is_of_the_time_between_two_looks() -> None:
    driver = Nvml()
    watch = GpuWatch(0, driver)
    assert watch.share is None
    for counter, share in ((40.0, 0.4), (65.0, 0.25), (65.0, 0.0)):
        driver.counter = counter
        watch.look()
        assert watch.share == share


def test_a_device_that_cannot_tell_its_busy_sms_tells_its_clock() -> None:
    driver = Nvml(supported=False)
    watch = GpuWatch(0, driver)
    clocked(watch, driver, 1980, 1980, 1200, 1200)
    assert watch.share is None
    assert "1200" in watch.take_change()


def test_power_is_what_was_used_between_two_looks_over_their_time() -> None:
    driver, seconds = Nvml(), [10.0]
    watch = GpuWatch(0, driver, clock=lambda: seconds[0])
    watch.look()
    assert watch.power_w is None
    for used, watts in ((200_000, 400.0), (0, 0.0), (150_000, 300.0)):
        assert driver.millijoules is not None
        driver.millijoules += used
        seconds[0] += 0.5
        watch.look()
        assert watch.power_w == watts


def test_a_device_that_counts_no_energy_tells_its_present_power_and_one_that_tells_neither_nothing() -> None:
    driver = Nvml()
    watch = GpuWatch(0, driver)
    driver.millijoules = None
    watch.look()
    assert watch.power_w == 700.0
    driver.milliwatts = None
    clocked(watch, driver, 1980, 1980, 1200, 1200)
    assert watch.power_w is None and "1200" in watch.take_change(), "the rest is told all the same"


def test_a_device_that_is_not_there_is_let_be() -> None:
    watch = GpuWatch(1, Nvml())
    watch.start()
    assert (watch.share, watch.power_w, watch.take_change()) == (None, None, "")


def clocked(watch: GpuWatch, driver: Nvml, *mhz: int, working: int = 100) -> None:
    """Looks at a device that runs at these clocks, one after another."""
    for driver.mhz in mhz:
        driver.working = working
        watch.look()


def test_a_clock_that_falls_and_one_that_rises_are_each_told_once() -> None:
    driver = Nvml()
    watch = GpuWatch(0, driver)
    clocked(watch, driver, 1980, 1980, 1935, 1965)
    assert watch.take_change() == ""
    clocked(watch, driver, 1410, 1395, 1410)
    assert watch.take_change() == "the SMs' clock went from 1980 to 1395 MHz"
    assert watch.take_change() == ""
    clocked(watch, driver, 1980, 1980)
    assert watch.take_change() == "the SMs' clock went from 1395 to 1980 MHz"


def test_a_moment_at_another_clock_and_the_rest_of_an_idle_device_are_no_change() -> None:
    driver = Nvml()
    watch = GpuWatch(0, driver)
    clocked(watch, driver, 345, 345, working=0)
    clocked(watch, driver, 1980, 1980, 1200, 1980, 1200, 1980)
    clocked(watch, driver, 345, 345, 345, working=10)
    assert watch.take_change() == ""


def test_where_a_gpu_cannot_tell_it_is_what_steps_and_tasklets_took() -> None:
    assert busy_share(CUDA, 0.3, work_s=0.5, cpu_s=9.0, seconds=1.0) == 0.3
    assert busy_share(CUDA, None, work_s=0.5, cpu_s=9.0, seconds=1.0) == 0.5
    assert busy_share(CUDA, None, work_s=3.0, cpu_s=9.0, seconds=1.0) == 1.0
    assert 0 < busy_share(CPU, None, work_s=0.5, cpu_s=0.1, seconds=1.0) <= 0.1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_busy_gpu_is_told_from_an_idle_one() -> None:
    a = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    time.sleep(0.3)  # so that nothing of what ran before is counted
    watch = GpuWatch(torch.cuda.current_device())
    time.sleep(0.3)
    watch.look()
    idle, idle_w = watch.share, watch.power_w
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        a @ a
        torch.cuda.synchronize()
    watch.look()
    assert idle is not None and idle < 0.3
    assert watch.share is not None and watch.share > 0.6
    assert idle_w is None and watch.power_w is not None and 50 < watch.power_w < 2000
