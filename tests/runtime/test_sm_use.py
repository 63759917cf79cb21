"""Facts about how busy a GPU is said to be."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from core.runtime.report import busy_share
from core.runtime.sm_use import SmUse

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


class Nvml:
    """A driver whose counter of busy SMs the test moves; NVML's own structures."""

    NVMLError = pynvml.NVMLError
    NVML_GPM_METRICS_GET_VERSION = pynvml.NVML_GPM_METRICS_GET_VERSION
    NVML_GPM_METRIC_SM_UTIL = pynvml.NVML_GPM_METRIC_SM_UTIL
    c_nvmlGpmMetricsGet_t = pynvml.c_nvmlGpmMetricsGet_t

    def __init__(self, supported: bool = True) -> None:
        self._supported, self.counter = supported, 0.0
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

    def nvmlGpmMetricsGet(self, asked: Any) -> None:
        assert (asked.version, asked.numMetrics, asked.metrics[0].metricId) == (1, 1, 2)
        before, now = (self._seen[pynvml.addressof(s.contents)] for s in (asked.sample1, asked.sample2))
        asked.metrics[0].value = now - before


def test_the_share_is_of_the_time_between_two_looks() -> None:
    driver = Nvml()
    use = SmUse(0, driver)
    assert use.share is None
    for counter, share in ((40.0, 0.4), (65.0, 0.25), (65.0, 0.0)):
        driver.counter = counter
        use.look()
        assert use.share == share


@pytest.mark.parametrize(("driver", "index"), [(Nvml(supported=False), 0), (Nvml(), 1)])
def test_a_device_that_cannot_tell_is_let_be(driver: Nvml, index: int) -> None:
    use = SmUse(index, driver)
    use.start()
    assert use.share is None


def test_where_a_gpu_cannot_tell_it_is_what_steps_and_tasklets_took() -> None:
    assert busy_share(CUDA, 0.3, work_s=0.5, cpu_s=9.0, seconds=1.0) == 0.3
    assert busy_share(CUDA, None, work_s=0.5, cpu_s=9.0, seconds=1.0) == 0.5
    assert busy_share(CUDA, None, work_s=3.0, cpu_s=9.0, seconds=1.0) == 1.0
    assert 0 < busy_share(CPU, None, work_s=0.5, cpu_s=0.1, seconds=1.0) <= 0.1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_busy_gpu_is_told_from_an_idle_one() -> None:
    use = SmUse(torch.cuda.current_device())
    a = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    time.sleep(0.3)
    use.look()
    idle = use.share
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        a @ a
        torch.cuda.synchronize()
    use.look()
    assert idle is not None and idle < 0.3
    assert use.share is not None and use.share > 0.6
