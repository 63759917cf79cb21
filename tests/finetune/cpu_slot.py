"""A captured slot whose device is the CPU: `CapturedTrainer` with work that is run in the place of graphs that are
launched. All else, above all its way with memory, is the real one."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from core.finetune import base_folder, captured, views
from core.finetune.captured import CapturedTrainer, Slot
from core.finetune.captured_job import CapturedJob
from core.finetune.fused import FusedStep, FusedWeights, Work
from core.finetune.streamed import StreamedBase
from core.intake import packing
from core.intake.packing import MicroBatch
from core.link.messages import JobSpec
from core.memory.arena import Arena
from core.memory.moment import Passed
from core.memory.share import JobShare
from core.memory.slot import SlotMemory
from core.memory.staging import staging
from tests.finetune import small

TOKENS, RANK = 32, 4


def no_room(pages: int) -> None:
    """The arena has room enough."""


def weights(source: PreTrainedModel, path: Path) -> FusedWeights:
    served = small.Served(source)
    return FusedWeights.of(served, views.shared_model(served, small.folder(source, path)))


class Stream:
    """Of a device that is never behind."""

    def record_event(self) -> Passed:
        return Passed()

    def wait_event(self, event: Any) -> None:
        """It is over."""

    def wait_stream(self, stream: Any) -> None:
        """It is over."""


class _Event(Passed):
    def record(self, stream: Stream) -> None:
        """It has passed."""


class _Cuda:
    """What of `torch.cuda` a captured trainer uses once it is made."""

    @staticmethod
    def current_stream(device: torch.device) -> Stream:
        return Stream()

    @staticmethod
    def stream(stream: Stream) -> nullcontext[None]:
        return nullcontext()

    @staticmethod
    def set_stream(stream: Stream) -> None:
        """There is no other."""

    @staticmethod
    def Event() -> _Event:
        return _Event()


class _Torch:
    cuda = _Cuda

    @staticmethod
    def empty(*size: int, pin_memory: bool) -> torch.Tensor:
        return torch.empty(*size)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured trainers find a device that does everything at once."""
    monkeypatch.setattr(captured, "torch", _Torch())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)


class _Graph:
    def __init__(self, fused: FusedStep, work: Work) -> None:
        self._fused, self._work = fused, work

    def replay(self) -> None:
        self._fused.run(self._work)


class CpuSlot(CapturedTrainer):
    """A slot over `source`'s weights, on the arena where there is one; there, with a window of so many layers, over a
    folder of them that is streamed."""

    def __init__(
        self,
        source: PreTrainedModel,
        path: Path,
        arena: Arena | None,
        window: int | None = None,
        recompute: bool = False,
    ) -> None:
        self.slot = Slot(RANK, TOKENS, recompute)
        memory = self.memory = SlotMemory(arena, no_room) if arena is not None else None
        self.streamed = None
        if window is not None:
            assert memory is not None
            source.save_pretrained(path)
            folder = base_folder.read(path, torch.float32)
            self.streamed = StreamedBase(
                folder, window, memory.buffer, device=torch.device("cpu"), mappings=lambda: memory.mappings
            )
            self._model, fused = self.streamed.model, self.streamed.fused()
        else:
            served = small.Served(source)
            self._model = views.shared_model(served, small.folder(source, path))
            fused = FusedWeights.of(served, self._model)
        self._fused = FusedStep(fused, rank=RANK, micro_batch_tokens=TOKENS, recompute=recompute, place=self.memory)
        self._graphs = [{work: _Graph(self._fused, work) for work in self._fused.every_work()}]  # type: ignore[misc]
        self._device = torch.device("cpu")
        self._staging = staging(self._device)
        self.streams, self._entered = (Stream(),), None  # type: ignore[assignment]
        self._constants, self._program, self._copied = (0.0, 0.0, 0.0), None, None
        self._pending, self._reports = deque(), []
        self._mapping = 0
        self.share: JobShare | None = None

    def job(self, spec: JobSpec, resume_from: Path | None = None) -> CapturedJob:
        """A job in the slot; where there is an arena, its share is the test's to grant."""
        if self.streamed is not None:
            self.streamed.load()
        return CapturedJob(
            self, self._model, spec, small.rows(), base_name="small", resume_from=resume_from,
            new_share=self._new_share if self.memory is not None else None,
        )  # fmt: skip

    def _new_share(self) -> JobShare:
        assert self.memory is not None
        if self.share is not None:
            self.share.settle()
        self.share = JobShare(self.memory.state, self.memory.activations)
        return self.share

    def grant(self) -> None:
        assert self.share is not None
        self.share.grant(self.share.wanted)
        self.share.settle()

    @staticmethod
    def batches(count: int) -> list[MicroBatch]:
        rows = small.rows()
        plan = packing.epoch_plan([len(row.ids) for row in rows], TOKENS, seed=0, epoch=0)
        return [packing.build([rows[i] for i in plan[n % len(plan)]], TOKENS) for n in range(count)]
