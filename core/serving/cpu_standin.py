"""A stand-in for `sgl_kernel`, SGLang's compiled kernels, on machines without a GPU.

SGLang imports `sgl_kernel` everywhere and its CPU build is not on the package index. With the attention backend
`torch_native` and PyTorch sampling almost none of it is called: one operator is, and is written here in torch. Every
other name raises when called, by its name. Page-locking of host memory, which the LoRA code asks for and a CPU build of
torch refuses, becomes a no-op. Import this before sglang, in every process; it refuses where the real kernels are.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any, NoReturn

import torch
from torch.utils._device import _device_constructors

from core.errors import Invalid
from core.torchvision_ops import declare


def install() -> None:
    """Put the stand-in in place for this process; does nothing when it already is.

    Raises `Invalid` where the real `sgl_kernel` is installed: hiding it would cost all of its speed.
    """
    if isinstance(sys.modules.get("sgl_kernel"), _StandIn):
        return
    if "sgl_kernel" in sys.modules or importlib.util.find_spec("sgl_kernel") is not None:
        raise Invalid(
            "sgl_kernel_present",
            "sgl_kernel is installed, so its CPU stand-in is not to be used; set HARLI_ENGINE__DEVICE=cuda, or make an "
            "environment from requirements/cpu.lock",
            "engine.device",
        )
    declare()
    sys.modules["sgl_kernel"] = _StandIn("sgl_kernel")
    _ignore_pinning()


class _StandIn(types.ModuleType):
    """The module: known operators, and for any other name a function that raises."""

    __version__ = "0.0.0+standin"

    def __init__(self, name: str) -> None:
        super().__init__(name, __doc__)
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__path__: list[str] = []
        self.assign_req_to_token_pool_cpu = _assign_req_to_token_pool

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: object, **__: object) -> NoReturn:
            raise RuntimeError(f"sgl_kernel.{name} is not there on a CPU; the server's arguments ask for a GPU feature")

        return missing


def _assign_req_to_token_pool(
    rows: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    slots: torch.Tensor,
    _pool_length: int,
) -> None:
    """Write each request's new KV slots into its row: ``req_to_token[row, start:end] = its part of slots``."""
    taken = 0
    for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        part = slots[taken : taken + last - first]
        req_to_token[row, first:last] = part.to(req_to_token.dtype)
        taken += last - first


def _ignore_pinning() -> None:
    # `with torch.device(...)` knows factories by identity, and collects them when it is first used: before they change,
    # or it would pass the real ones by, and transformers leave buffers of models that it loads uninitialised.
    _device_constructors()

    def without_pinning(factory: Any) -> Any:
        @functools.wraps(factory)
        def make(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("pin_memory", None)
            return factory(*args, **kwargs)

        return make

    for name in ("tensor", "empty", "zeros", "ones", "full", "arange", "empty_like", "zeros_like", "ones_like"):
        setattr(torch, name, without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign,assignment,misc]
