"""AdamW over fp32 master weights, with a working copy in the model's dtype."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class LoraOptimizer:
    """`torch.optim.AdamW` on fp32 masters of the LoRA parameters.

    Gradients are accumulated in fp32 (`collect`, once per parameter and micro-batch), clipped by their global norm and
    applied (`step`); the working copy, which the model computes with, is then rounded from the masters. Where the model
    is fp32 the working copy is the master. Masters, gradients and moments are there from the start and stay the same
    tensors, so that they may lie anywhere (`tensors`, `move_to`).
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
            for p in self.masters.values():
                p.grad = torch.zeros_like(p)
                self._adamw.state[p] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }

    # ---- where it lies -----------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that it holds between two tasklets, but for the count of steps: `master.`, `gradient.`, `exp_avg.` and
        `exp_avg_sq.` of each parameter, and `working.` where that is another."""
        held: dict[str, torch.Tensor] = {}
        for name, p in self.masters.items():
            assert p.grad is not None
            held[f"master.{name}"], held[f"gradient.{name}"] = p.data, p.grad
            for key in ("exp_avg", "exp_avg_sq"):
                held[f"{key}.{name}"] = self._adamw.state[p][key]
            if self._working[name] is not p:
                held[f"working.{name}"] = self._working[name].data
        return held

    def move_to(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Compute with these from now on, by the names of `tensors`; that they hold the same is the caller's part. None
        of them is touched."""
        for name, p in self.masters.items():
            p.grad = None  # a gradient keeps a parameter from being given other memory
            p.data, p.grad = tensors[f"master.{name}"], tensors[f"gradient.{name}"]
            for key in ("exp_avg", "exp_avg_sq"):
                self._adamw.state[p][key] = tensors[f"{key}.{name}"]
            if self._working[name] is not p:
                self._working[name].data = tensors[f"working.{name}"]

    # ---- steps -------------------------------------------------------------------------------------------------------

    def collect(self, names: list[str]) -> None:
        """Move the named working gradients into the masters' fp32 accumulators."""
        for name in names:
            working, master = self._working[name], self.masters[name]
            if working is master or working.grad is None:
                continue
            assert master.grad is not None
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
        """Back to no gradient, that of an unfinished step included."""
        for name, master in self.masters.items():
            assert master.grad is not None
            master.grad.zero_()
            if self._working[name] is not master:
                self._working[name].grad = None

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Of the tensors that a checkpoint keeps, by the names of `tensors`."""
        return [f"{key}.{name}" for name in self.masters for key in ("master", "exp_avg", "exp_avg_sq")]

    def steps(self) -> dict[str, torch.Tensor]:
        """The count of steps, as a checkpoint keeps it; a copy."""
        return {f"step.{name}": self._adamw.state[p]["step"].clone() for name, p in self.masters.items()}

    def adapter(self, kept: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The LoRA parameters in the model's dtype, of the masters in `kept`."""
        return {name: kept[f"master.{name}"].to(working.dtype) for name, working in self._working.items()}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from `state`: tensors by `names` (moments may be missing before the first step) and `steps`."""
        with torch.inference_mode(False), torch.no_grad():
            for name, p in self.masters.items():
                p.copy_(state[f"master.{name}"])
                for key in ("step", "exp_avg", "exp_avg_sq"):
                    if f"{key}.{name}" in state:
                        self._adamw.state[p][key].copy_(state[f"{key}.{name}"])
            self._publish()

    def _publish(self) -> None:
        with torch.no_grad():
            for name, working in self._working.items():
                if working is not self.masters[name]:
                    working.copy_(self.masters[name])
