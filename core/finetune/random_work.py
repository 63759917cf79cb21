"""Captured tasklets without end, over random tokens: what a profile or a benchmark runs beside decode."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np

from core.intake.packing import MicroBatch
from core.policy.types import Layout, TaskletKind

if TYPE_CHECKING:
    import torch

    from core.finetune.captured import CapturedTrainer

_ROWS = 4


class RandomWork:
    """Micro-batch after micro-batch in `trainer`'s slot, which then holds a job of its own.

    places: of each layout's finetune stream among those of the trainer; parameters: the LoRA to begin with (none:
    zeros, which take as long). kinds: of a micro-batch's tasklets and its optimizer step.
    """

    def __init__(
        self,
        trainer: CapturedTrainer,
        places: Mapping[Layout, int],
        vocabulary: int,
        parameters: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._trainer, self._places = trainer, dict(places)
        trainer.load_job(parameters or {}, scaling=1.0, weight_decay=0.0, max_grad_norm=1.0)
        # The same one again and again: to pack it takes longer than to launch it.
        self._program = trainer.program([_micro_batch(trainer.slot.micro_batch_tokens, vocabulary)], 1e-5)
        self.micro_batch_tokens = trainer.slot.micro_batch_tokens
        self._losses: deque[float] = deque(maxlen=8)
        self._load()

    def upcoming(self, count: int) -> tuple[TaskletKind, ...]:
        """The next ones, also of the micro-batch behind the open one."""
        return (self.kinds[self._next :] + self.kinds)[:count]

    def on(self, layout: Layout) -> AbstractContextManager[None]:
        """See `CapturedTrainer`."""
        return self._trainer.on(self._places[layout])

    def launch(self, layout: Layout) -> TaskletKind:
        """Queue the next one on the layout's finetune stream."""
        kind = self.kinds[self._next]
        self._trainer.launch(self._places[layout], self._next)
        self._next += 1
        if self._next == len(self.kinds):
            self._load()
        return kind

    def losses(self) -> list[float]:
        """Of the last few micro-batches that have ended."""
        self._losses += [result.loss for result in self._trainer.results()]
        return list(self._losses)

    def _load(self) -> None:
        self.losses()
        self.kinds: tuple[TaskletKind, ...] = self._trainer.load(self._program)
        self._next = 0


def _micro_batch(tokens: int, vocabulary: int) -> MicroBatch:
    """Rows of equal length, four if that comes out even, every position trained but the last of each."""
    rows = _ROWS if tokens % _ROWS == 0 else 1
    row = tokens // rows
    ids = np.random.default_rng(0).integers(5, vocabulary - 5, tokens)
    labels = np.append(ids[1:], -100)
    labels[row - 1 :: row] = -100
    return MicroBatch(
        ids=ids.astype(np.int64),
        labels=labels.astype(np.int64),
        positions=np.tile(np.arange(row), rows).astype(np.int64),
        segments=np.repeat(np.arange(rows), row).astype(np.int32),
        tokens=tokens,
        trained=int((labels >= 0).sum()),
    )
