"""SM partitions by green contexts (CUDA driver 12.4 and later), made once at the start.

A green context owns some of the device's SMs; what runs on its streams stays on them, and a CUDA graph keeps the SMs of
the stream that it was captured on, wherever it is launched. Each split makes two: decode's part and the remainder for
finetuning. A confined layout reuses the remainder beside a decode that has the whole device at high priority.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from core.errors import Unavailable
from core.partition.part import Part, Partitions, whole_device
from core.partition.sizes import Granularity, decode_sizes
from core.policy.types import WHOLE, Layout

logger = logging.getLogger(__name__)

_HIGH_PRIORITY = -1


def make(device: torch.device, count: int, sizes: Sequence[int] = ()) -> Partitions:
    """`count` splits of the device, or those with decode parts of `sizes` SMs, and as many confined layouts; ``whole``
    alone when it has no green contexts, which is logged with the driver's reason, or when none are asked for."""
    if device.type != "cuda":
        return whole_device()
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    finetune = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    if count < 1 and not sizes:
        return whole_device(sms, finetune)
    try:
        driver = Driver(device.index or 0)
        splits = [driver.split(size) for size in sizes or decode_sizes(driver.granularity, count)]
    except Unavailable as error:
        logger.warning("decode and finetuning share the device in time only: %s", error.message)
        return whole_device(sms, finetune)
    parts = [Part(WHOLE, None, finetune), *splits]
    if splits:
        decode = torch.cuda.Stream(device, priority=_HIGH_PRIORITY)  # type: ignore[no-untyped-call]
        parts += [Part(Layout("confined", 0, part.layout.finetune_sms), decode, part.finetune) for part in splits]
    return Partitions(driver.granularity.sms, tuple(parts))


class Driver:
    """The calls of the CUDA driver that divide one device. Contexts and streams live as long as the process: graphs
    refer to them."""

    def __init__(self, index: int) -> None:
        """Raises `Unavailable` when the bindings or the driver have no green contexts."""
        try:
            from cuda.bindings import driver as cu
        except ImportError as error:
            raise Unavailable(
                "no_green_contexts", f"cuda.bindings is not installed ({error}); install cuda-python", "partitions"
            ) from error
        self._cu = cu
        self._index = index
        torch.zeros(1, device=f"cuda:{index}")  # the primary context must exist
        self._device = self._call("cuDeviceGet", index)
        self._kind = cu.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        self._all = self._call("cuDeviceGetDevResource", self._device, self._kind)
        self._kept: list[Any] = []
        self.granularity = self._granularity()

    def split(self, decode_sms: int) -> Part:
        """Divide the device; the layout has the SM counts that the driver really gave, read back from the contexts."""
        groups, _, rest = self._call("cuDevSmResourceSplitByCount", 1, self._all, 0, decode_sms)
        decode, decode_count = self._context(groups[0])
        finetune, finetune_count = self._context(rest)
        return Part(Layout("split", decode_count, finetune_count), decode, finetune)

    def _granularity(self) -> Granularity:
        """What the driver says where it does (CUDA 13), else what a split of one SM comes to."""
        total = int(self._all.sm.smCount)
        smallest = int(getattr(self._all.sm, "minSmPartitionSize", 0) or 0)
        step = int(getattr(self._all.sm, "smCoscheduledAlignment", 0) or 0)
        if not smallest or not step:
            groups, _, _ = self._call("cuDevSmResourceSplitByCount", 1, self._all, 0, 1)
            smallest = smallest or int(groups[0].sm.smCount)
            step = step or smallest
        return Granularity(total, smallest, step)

    def _context(self, resource: Any) -> tuple[torch.cuda.ExternalStream, int]:
        cu = self._cu
        descriptor = self._call("cuDevResourceGenerateDesc", [resource], 1)
        context = self._call(
            "cuGreenCtxCreate", descriptor, self._device, cu.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        )
        given = self._call("cuGreenCtxGetDevResource", context, self._kind)
        stream = self._call("cuGreenCtxStreamCreate", context, cu.CUstream_flags.CU_STREAM_NON_BLOCKING, 0)
        self._kept.append((descriptor, context, stream))
        external = torch.cuda.ExternalStream(int(stream), device=self._index)  # type: ignore[no-untyped-call]
        return external, int(given.sm.smCount)

    def _call(self, name: str, *arguments: Any) -> Any:
        error, *values = getattr(self._cu, name)(*arguments)
        if int(error) != 0:
            raise Unavailable(
                "no_green_contexts",
                f"{name} gave {error}: the driver cannot divide this device's SMs; one of CUDA 12.4 or later can on a "
                "GPU of compute capability 7 or later",
                "partitions",
            )
        return values[0] if len(values) == 1 else values


def describe(partitions: Partitions) -> Sequence[str]:
    """The layouts' names, for `Hello`."""
    return [str(layout) for layout in partitions.layouts]
