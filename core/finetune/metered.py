"""A trainer that stays within its share of the arena."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from core.finetune.streamed import StreamedBase
from core.finetune.trainer import Metric, Trainer
from core.intake.chat import Encoded
from core.link.messages import JobSpec
from core.memory.arena import OutOfMemory
from core.memory.moment import Moment
from core.memory.share import GrowingActivations, JobShare
from core.policy.types import TaskletKind

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class MeteredTrainer(Trainer):
    """Its LoRA parameters, gradients and optimizer state lie in the arena, or in host memory while the pages are
    somebody else's; activations go as far as they were granted. What goes beyond starts again, with the same result,
    once more has been granted. It runs while its `share` is ready.

    new_share: makes the share of a job with such a state, whose content it takes over, and its activations.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        spec: JobSpec,
        rows: Sequence[Encoded],
        *,
        base_name: str,
        resume_from: Path | None = None,
        streamed: StreamedBase | None = None,
        new_share: Callable[[Sequence[torch.Tensor]], tuple[JobShare, GrowingActivations]],
    ) -> None:
        super().__init__(model, spec, rows, base_name=base_name, resume_from=resume_from, streamed=streamed)
        try:
            tensors = self._optimizer.tensors()
            self._place = {name: number for number, name in enumerate(tensors)}
            self.share, self._activations = new_share(list(tensors.values()))
            self._optimizer.move_to(dict(zip(tensors, self.share.state.tensors, strict=True)))
        except Exception:
            super().close()
            raise

    def run_next(self) -> TaskletKind:
        """Run one tasklet, or find that its micro-batch needs more memory than was granted, ask for it and go back to
        the micro-batch's start. Raises `OutOfMemory` when the job can never get as much."""
        (kind,) = self.upcoming(1)
        try:
            with self._activations.computing():
                return super().run_next()
        except OutOfMemory:
            if not self._activations.ask():
                raise
        self.start_again()
        return kind

    @property
    def _present(self) -> bool:
        return self.share.ready

    def start_again(self) -> Moment | None:
        # Where the state is away nothing has been computed since it left, and its gradients cannot be touched.
        return super().start_again() if self.share.state.inside else None

    def take_metrics(self) -> list[Metric]:
        self.share.check()
        return super().take_metrics()

    def _contents(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        copies = self.share.state.contents(self._place[name] for name in names)
        return dict(zip(names, copies, strict=True))

    def close(self) -> Moment | None:
        over = super().close()
        self.share.close(over)
        return over
