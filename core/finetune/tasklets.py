"""One micro-batch as tasklets: layer forwards, the head in chunks, layer backwards.

Autograd runs inside each layer; between layers the chain is cut by `detach`, so that each piece can be launched alone
and the runtime is never bound for longer than one layer. The results are those of one `loss.backward()`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional as F

from core.finetune.batch import PackedBatch
from core.policy.types import TaskletKind

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Tasklet(NamedTuple):
    """The smallest piece of finetuning that is launched as one."""

    kind: TaskletKind
    run: Callable[[], None]


class DropoutSeed(NamedTuple):
    """Where in a job a micro-batch stands. Dropout's random numbers are a function of this and the layer, so a run that
    was resumed, or interleaved with sampling in the same process, draws the same ones."""

    seed: int
    micro_batch: int

    def of_layer(self, layer: int) -> int:
        return (self.seed * 1_000_003 + self.micro_batch) * 1_009 + layer


class MicroBatchRun:
    """The state of one micro-batch between its tasklets. `loss` is the sum over its trained tokens once the head ran.

    `denominator` is what the summed loss is divided by before backward: the trained tokens of the whole optimizer step,
    so that accumulation weighs every token alike. `dropout` None means evaluation: no backward. `layer`: around what
    computes with a layer, each time in the order of `layers`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batch: PackedBatch,
        *,
        denominator: int,
        loss_chunk_tokens: int,
        train: bool,
        dropout: DropoutSeed | None,
        after_backward: Callable[[int], None] | None = None,
        layer: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._core, self._head = model.model, model.lm_head
        self._batch = batch
        self._denominator = denominator
        self._train = train
        self._dropout = dropout
        self._after_backward = after_backward
        self._layer = layer
        self._hidden: torch.Tensor | None = None
        self._gradient: torch.Tensor | None = None
        self._rotary: tuple[torch.Tensor, torch.Tensor] | None = None
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._chunks = torch.split(batch.trained, loss_chunk_tokens), torch.split(batch.targets, loss_chunk_tokens)
        self._losses: list[torch.Tensor] = []

    @property
    def layers(self) -> list[int]:
        """Those that the program computes with, in order."""
        forward = list(range(len(self._core.layers)))
        return forward + forward[::-1] if self._train else forward

    def tasklets(self) -> list[Tasklet]:
        """The micro-batch's program, in order."""
        layers = range(len(self._core.layers))
        program = [Tasklet("forward", lambda i=i: self._with_layer(self._forward, i)) for i in layers]  # type: ignore[misc]
        program += [
            Tasklet("head", lambda r=rows, t=targets: self._loss(r, t))  # type: ignore[misc]
            for rows, targets in zip(*self._chunks, strict=True)
        ]
        if self._train:
            program += [
                Tasklet("backward", lambda i=i: self._with_layer(self._backward, i))  # type: ignore[misc]
                for i in reversed(layers)
            ]
        return program

    def loss(self) -> float:
        """Summed loss of the trained tokens (nats); waits for the device."""
        return float(torch.stack(self._losses).sum()) if self._losses else 0.0

    def _with_layer(self, run: Callable[[int], None], index: int) -> None:
        with self._layer():
            run(index)

    def _forward(self, index: int) -> None:
        if index == 0:
            with torch.no_grad():
                self._hidden = self._core.embed_tokens(self._batch.ids)
                self._rotary = self._core.rotary_emb(self._hidden, self._batch.positions)
        assert self._hidden is not None
        # Nothing in front of the first layer is trained, so its input needs no gradient.
        entry = self._hidden.detach().requires_grad_(self._train and index > 0)
        with torch.set_grad_enabled(self._train), self._random(index):
            out = self._core.layers[index](
                entry,
                attention_mask=self._batch.mask,
                position_ids=self._batch.positions,
                position_embeddings=self._rotary,
            )
        if self._train:
            self._saved.append((entry, out))
        self._hidden = out.detach()

    def _loss(self, rows: torch.Tensor, targets: torch.Tensor) -> None:
        assert self._hidden is not None
        picked = self._hidden[0, rows].requires_grad_(self._train)
        with torch.set_grad_enabled(self._train):
            logits = self._head(self._core.norm(picked))
            loss = F.cross_entropy(logits.float(), targets, reduction="sum")
            self._losses.append(loss.detach())
            if self._train:
                (gradient,) = torch.autograd.grad(loss / self._denominator, picked)
                if self._gradient is None:
                    self._gradient = torch.zeros_like(self._hidden)
                self._gradient[0, rows] = gradient

    def _backward(self, index: int) -> None:
        entry, out = self._saved.pop()
        if self._gradient is None:  # no token of the batch is trained
            self._gradient = torch.zeros_like(out)
        torch.autograd.backward(out, self._gradient)
        self._gradient = entry.grad if index > 0 else None
        if self._after_backward is not None:
            self._after_backward(index)

    def _random(self, layer: int) -> AbstractContextManager[None]:
        if self._dropout is None:
            return nullcontext()
        return _seeded(self._dropout.of_layer(layer), self._batch.ids.device)


class _seeded(AbstractContextManager[None]):
    """Run with torch's generators seeded, then put them back: sampling shares them in SGLang's process."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._fork = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
        self._seed = seed % 2**63

    def __enter__(self) -> None:
        self._fork.__enter__()
        torch.manual_seed(self._seed)

    def __exit__(self, *error: object) -> None:
        self._fork.__exit__(*error)  # type: ignore[arg-type]
