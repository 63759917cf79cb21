"""A base model other than the served one: its layers are streamed from host memory through a window on the device.

Model and fused weights lie over the window's slots, so that both trainers compute with them as with the served model's
own; only that a layer has to be there when it is due, which the trainers see to with `StreamedBase.window`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from core.errors import Invalid
from core.finetune import base_folder, views
from core.finetune.base_folder import BaseFolder
from core.finetune.fused import FusedWeights
from core.memory.moment import Moment
from core.memory.rate import Rate
from core.memory.window import HostWeights, LayerWindow
from core.policy.types import TaskletKind

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class StreamedBase:
    """`folder` over a window of `slots` layers on `device`.

    new, mappings, rate: see `LayerWindow`. model: its Hugging Face model, frozen, of which a layer may be computed with
    while the window has it; weights are in host memory between `load` and `unload`.
    """

    def __init__(
        self,
        folder: BaseFolder,
        slots: int,
        new: Callable[[tuple[int, ...], torch.dtype], torch.Tensor],
        *,
        device: torch.device,
        mappings: Callable[[], int] = lambda: 0,
        rate: Rate = Rate(),
    ) -> None:
        self.folder = folder
        self._device = device
        self.window = LayerWindow(
            folder.layers,
            folder.layer_shapes,
            folder.fixed_shapes,
            min(slots, folder.layers),
            new,
            device=device,
            mappings=mappings,
            rate=rate,
        )
        self._module = _Fused(folder, self.window)
        self.model: PreTrainedModel = views.shared_model(self._module, folder.path)
        self._unloading: threading.Thread | None = None

    @property
    def name(self) -> str:
        return self.folder.name

    def fused(self) -> FusedWeights:
        """The weights for captured tasklets. Raises `UnsupportedWeights`."""
        return FusedWeights.of(self._module, self.model)

    def load(self) -> None:
        """Read the weights into host memory. Takes as long as that takes; raises what `base_folder.load` does."""
        if self._unloading is not None:
            self._unloading.join()
        self.window.source = base_folder.load(self.folder, self._device)

    def unload(self) -> Moment:
        """Give the host memory back once what is copied from it is over, in a thread of its own: unlocking pages takes
        long. Answers when nothing is copied to the device any more."""
        over = self.window.stop()
        source, self.window.source = self.window.source, None
        if source is not None:
            arguments = (source, over, self.window)
            self._unloading = threading.Thread(target=_close, args=arguments, name="harli-unload", daemon=True)
            self._unloading.start()
        return over

    def told(self) -> str:
        """For people."""
        window, folder = self.window, self.folder
        return (
            f"base {self.name}: {folder.layers} layers go through a window of {window.slots} "
            f"({window.bytes / 2**20:,.0f} MiB with embedding and head), from {folder.host_bytes / 2**20:,.0f} MiB of "
            "host memory"
        )


def ready(window: LayerWindow, kinds: Sequence[TaskletKind]) -> int:
    """How many of the tasklets that come next, of these kinds, find their layers there."""
    layers = window.there(sum(_has_layer(kind) for kind in kinds))
    for number, kind in enumerate(kinds):
        layers -= _has_layer(kind)
        if layers < 0:
            return number
    return len(kinds)


def _has_layer(kind: TaskletKind) -> bool:
    return kind in ("forward", "backward")


def check_room(folder: BaseFolder, slots: int, most_bytes: int) -> None:
    """Raise `Invalid` when a job cannot have the window's memory, of which it can have `most_bytes`."""
    needed = folder.window_bytes(min(slots, folder.layers))
    if needed <= most_bytes:
        return
    fewer = next((k for k in range(slots, 0, -1) if folder.window_bytes(min(k, folder.layers)) <= most_bytes), 0)
    remedy = f"set HARLI_FINETUNE__WINDOW_LAYERS to {fewer} or less" if fewer else "not even one layer would fit"
    raise Invalid(
        "window_too_large",
        f"a window of {slots} layers of {folder.name}, with its embedding and head, takes {needed / 2**20:.0f} MiB and "
        f"a job can have {most_bytes / 2**20:.0f} MiB; {remedy}, or start the engine with a larger "
        "engine.max_total_tokens",
        "base_model",
    )


def _close(source: HostWeights, over: Moment, window: LayerWindow) -> None:
    over.synchronize()
    del window  # what was copied to had to be there until now
    source.close()


class _Fused(torch.nn.Module):
    """The window's tensors by the names of SGLang's model, each layer's in the slot that it goes through."""

    def __init__(self, folder: BaseFolder, window: LayerWindow) -> None:
        super().__init__()
        with torch.inference_mode(False):
            for index in range(folder.layers):
                for weight, tensor in zip(folder.layer, window.tensors(index), strict=True):
                    self._put(f"model.layers.{index}.{weight.name}", tensor)
            for weight, tensor in zip(folder.fixed, window.fixed_tensors, strict=True):
                self._put(weight.name, tensor)

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        owner: torch.nn.Module = self
        *path, leaf = name.split(".")
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, torch.nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(leaf, torch.nn.Parameter(tensor, requires_grad=False))
