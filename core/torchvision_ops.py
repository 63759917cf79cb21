"""Operators that torchvision's wheel expects of its own compiled part.

The wheel's compiled part is a CUDA build and does not load beside a CPU torch; the Python part then registers shape
functions for two operators that nobody declared, and the import of torchvision, and of transformers behind it, fails.
Declaring the operators is enough: nothing here ever calls them.
"""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def declare() -> Any:
    """Declare torchvision's operators on a CPU build of torch; call before importing transformers or sglang.

    Returns the library handle, which must stay alive (the cache keeps it); None on a CUDA build, where the real ones
    load.
    """
    import torch

    if torch.version.cuda is not None:
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
    return library
