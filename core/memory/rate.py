"""How fast copies between a device and its host may go beside decode."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rate:
    """At most `bytes_s` bytes a second, on average since the copy began; None: as fast as it goes."""

    bytes_s: float | None = None

    def wait_s(self, done: int, elapsed_s: float) -> float:
        """Seconds to wait before the next piece, `done` bytes after `elapsed_s`."""
        return max(0.0, done / self.bytes_s - elapsed_s) if self.bytes_s else 0.0


# About a fifth of what the link of a PCIe 5 card moves by its specification: the rest is decode's.
GPU_RATE = Rate(12.0 * 2**30)
