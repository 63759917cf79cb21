"""Which SM partitions to make of a device: pure arithmetic over what the driver reports."""

from __future__ import annotations

from typing import NamedTuple


class Granularity(NamedTuple):
    """A device's SMs and how they can be divided: parts are multiples of `step` SMs and have at least `smallest`."""

    sms: int
    smallest: int
    step: int


def decode_sizes(device: Granularity, count: int) -> tuple[int, ...]:
    """SMs of the decode part of `count` splits, the largest decode part first; the rest is finetuning's.

    The finetune parts grow by equal factors from a seventh of the device (on less, a single tasklet outlasts several
    decode steps) to three quarters of it. Fewer than `count` come back where the granularity has no more; none where a
    device cannot be split.
    """
    smallest = -(-device.smallest // device.step) * device.step
    if count < 1 or device.sms < 2 * smallest:
        return ()
    low, high = max(smallest, device.sms / 7), max(smallest, device.sms * 3 / 4)
    sizes = set()
    for n in range(count):
        wanted = low * (high / low) ** (n / (count - 1)) if count > 1 else device.sms / 2
        # The decode part is what the driver rounds to its granularity; finetuning gets the rest.
        decode = round((device.sms - wanted) / device.step) * device.step
        sizes.add(min(max(decode, smallest), (device.sms - smallest) // device.step * device.step))
    return tuple(sorted(sizes, reverse=True))
