"""AdamW over fp32 master weights, with a working copy in the model's dtype."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class LoraOptimizer:
    """`torch.optim.AdamW` on fp32 masters of the LoRA parameters.

    Gradients are accumulated in fp32 (`collect`, once per parameter and micro-batch), clipped by their global norm and
    applied (`step`); the working copy, which the model computes with, is then rounded from the masters. Where the model
    is fp32 the working copy is the master.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], *, weight_decay: float, max_grad_norm: float
    ) -> None:
        self._working = dict(parameters)
        self._max_grad_norm = max_grad_norm
        with torch.inference_mode(False):
            self.masters = {
                name: p if p.dtype == torch.float32 else torch.nn.Parameter(p.detach().float())
                for name, p in parameters.items()
            }
        self._adamw = torch.optim.AdamW(self.masters.values(), lr=0.0, weight_decay=weight_decay)

    @property
    def bytes(self) -> int:
        """Of masters, gradients and both moments, and of the working copy where that is another."""
        masters = sum(p.numel() * p.element_size() for p in self.masters.values())
        copies = sum(p.numel() * p.element_size() for n, p in self._working.items() if p is not self.masters[n])
        return 4 * masters + copies

    def collect(self, names: list[str]) -> None:
        """Move the named working gradients into the masters' fp32 accumulators."""
        for name in names:
            working, master = self._working[name], self.masters[name]
            if working is master or working.grad is None:
                continue
            if master.grad is None:
                master.grad = working.grad.float()
            else:
                master.grad += working.grad
            working.grad = None

    def step(self, learning_rate: float) -> float:
        """One update; returns the gradients' norm before clipping and clears them."""
        norm = torch.nn.utils.clip_grad_norm_(self.masters.values(), self._max_grad_norm)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self.clear()
        self._publish()
        return float(norm)

    def clear(self) -> None:
        """Drop gradients, those of an unfinished step included."""
        for working, master in zip(self._working.values(), self.masters.values(), strict=True):
            working.grad = master.grad = None

    def state(self) -> dict[str, torch.Tensor]:
        """A copy on the CPU of masters and moments, for a checkpoint."""
        copied = {f"master.{name}": p.detach().to("cpu", copy=True) for name, p in self.masters.items()}
        for name, p in self.masters.items():
            for key, value in self._adamw.state.get(p, {}).items():
                copied[f"{key}.{name}"] = torch.as_tensor(value).detach().to("cpu", copy=True)
        return copied

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from `state`."""
        with torch.inference_mode(False), torch.no_grad():
            for name, p in self.masters.items():
                p.copy_(state[f"master.{name}"])
                moments = {
                    key: state[f"{key}.{name}"].to(p.device if key != "step" else "cpu", copy=True)
                    for key in ("step", "exp_avg", "exp_avg_sq")
                    if f"{key}.{name}" in state
                }
                if moments:
                    self._adamw.state[p] = moments
            self._publish()

    def _publish(self) -> None:
        with torch.no_grad():
            for name, working in self._working.items():
                if working is not self.masters[name]:
                    working.copy_(self.masters[name])
