"""A trainer that stays within its share of the arena."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from core.finetune.trainer import Trainer
from core.intake.chat import Encoded
from core.link.messages import JobSpec
from core.memory.arena import OutOfMemory
from core.memory.share import JobShare
from core.policy.types import TaskletKind

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class MeteredTrainer(Trainer):
    """Runs tasklets only as far as the activations that they save were granted; what goes beyond starts again, with the
    same result, once more has been granted. `make_share` gets the bytes of the job's state: parameters, gradients and
    moments, with the working copy where there is one."""

    def __init__(
        self,
        model: PreTrainedModel,
        spec: JobSpec,
        rows: Sequence[Encoded],
        *,
        base_name: str,
        resume_from: Path | None = None,
        make_share: Callable[[int], JobShare],
    ) -> None:
        super().__init__(model, spec, rows, base_name=base_name, resume_from=resume_from)
        try:
            self.share = make_share(self.state_bytes)
        except Exception:
            super().close()
            raise

    def run_next(self) -> TaskletKind:
        """Run one tasklet, or find that its micro-batch needs more memory than was granted, ask for it and go back to
        the micro-batch's start. Raises `OutOfMemory` when the job can never get as much."""
        (kind,) = self.upcoming(1)
        try:
            with self.share.metering():
                return super().run_next()
        except OutOfMemory:
            if not self.share.ask():
                raise
        self.start_again()
        return kind

    def close(self) -> None:
        super().close()
        self.share.close()
