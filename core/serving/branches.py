"""Kernels that a CUDA graph runs beside others, captured on one stream.

What a stream captures runs after what it captured before. A kernel that needs less than that can be given what it does
need, without a second stream, of which each part of the SMs would need its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


def captured_so_far() -> Sequence[Any] | None:
    """Nodes of the graph that the next kernel on this stream would run after; None when the stream captures nothing,
    or cuda.bindings is not there to tell."""
    driver = _driver()
    if driver is None or not torch.cuda.is_current_stream_capturing():
        return None
    nodes = _call("cuStreamGetCaptureInfo", _stream())[3]
    return [driver.CUgraphNode(int(node)) for node in nodes]  # what was given is over the driver's own memory


@contextmanager
def beside(before: Sequence[Any]) -> Iterator[None]:
    """What is captured inside runs after `before`, whatever was captured since; what follows runs after all of it.

    Raises RuntimeError with the driver's word for it when it refuses.
    """
    others = captured_so_far()
    assert others is not None, "`before` is of the graph that is being captured"
    _run_after(before)
    yield
    _run_after([*others, *(captured_so_far() or ())])


def _run_after(nodes: Sequence[Any]) -> None:
    replace = _driver().CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES
    _call("cuStreamUpdateCaptureDependencies", _stream(), list(nodes), None, len(nodes), int(replace))


@cache
def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    return driver


def _stream() -> Any:
    return _driver().CUstream(torch.cuda.current_stream().cuda_stream)


def _call(name: str, *arguments: Any) -> Any:
    error, *values = getattr(_driver(), name)(*arguments)
    if int(error) != 0:
        raise RuntimeError(f"{name} gave {error}")
    return values
