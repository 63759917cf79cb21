# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"
"""A Triton kernel that notes the GPU's time."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def stamp(seen, n):
    """seen[n]: the time, ns."""
    now = tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )  # fmt: skip
    tl.store(seen + n, now)
