"""What an engine on a GPU has for finetuning beside decode: partitions, decode graphs in each, captured tasklets, and
the executor over them. Made once, before the scheduler's loop begins, since capturing takes seconds."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pynvml
import torch

from core.config import Settings
from core.errors import NotFound
from core.finetune.captured import CapturedTrainer, Slot
from core.finetune.fused import FusedWeights
from core.partition import green
from core.policy.types import Predictor
from core.predictor.moving import MovingPredictor
from core.predictor.profile import Machine, cache_key, read_profile
from core.predictor.two_stage import TwoStagePredictor
from core.runtime.executor import Executor
from core.runtime.runtime import Queued
from core.serving.layouts import DecodeLayouts
from core.serving.versions import SGLANG

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


class DecodeQueue:
    """Raises `UnsupportedWeights` for a model that captured tasklets do not know, `Unavailable` for an engine without
    decode graphs; ``HARLI_ENGINE__CAPTURED=false`` finetunes both eagerly.

    predictor: fitted to this machine's profile when there is one in the data directory; otherwise it learns from what
    it sees, and finetuning gets the slack behind the steps only.
    """

    def __init__(self, scheduler: Any, shared: PreTrainedModel, settings: Settings) -> None:
        runner = scheduler.tp_worker.model_runner
        device = shared.model.embed_tokens.weight.device
        partitions = green.make(device, settings.engine.partitions)
        decode = DecodeLayouts(runner, partitions)
        streams = list(dict.fromkeys(part.finetune for part in partitions.parts))
        slot = Slot(scheduler.server_args.max_lora_rank, settings.finetune.micro_batch_tokens)
        self.trainer = CapturedTrainer(FusedWeights.of(runner.model, shared), slot, streams)
        self.predictor: Predictor = _predictor(
            settings, partitions.sms, scheduler.server_args.served_model_name, shared.dtype
        )
        self.layouts = tuple(green.describe(partitions))
        decode_stream = scheduler.forward_stream if scheduler.enable_overlap else torch.cuda.current_stream(device)
        executor = Executor(
            decode_stream,
            {part.layout: part.finetune for part in partitions.parts},
            select=decode.select,
            new_event=lambda: torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
            tasklet_ms=self.predictor.tasklet_ms,
        )
        places = {part.layout: streams.index(part.finetune) for part in partitions.parts}
        self.queued = Queued(executor, places, decode.padded)
        logger.warning(
            "%d layouts: decode graphs took %.1f s and %.2f GiB, tasklets of rank %d and %d tokens %.1f s and %.2f GiB",
            len(partitions.parts),
            sum(captured.seconds for captured in decode.captured),
            sum(captured.bytes for captured in decode.captured) / 2**30,
            slot.rank,
            slot.micro_batch_tokens,
            self.trainer.capture_s,
            self.trainer.memory_bytes / 2**30,
        )


def _predictor(settings: Settings, sms: int, model: str, dtype: torch.dtype) -> Predictor:
    pynvml.nvmlInit()
    machine = Machine(
        gpu=torch.cuda.get_device_name(),
        sms=sms,
        driver=pynvml.nvmlSystemGetDriverVersion(),
        model=model,
        engine=f"sglang {SGLANG}",
        dtype=str(dtype).removeprefix("torch."),
    )
    try:
        return TwoStagePredictor(read_profile(settings.data_dir / "profiles" / f"{cache_key(machine)}.json", machine))
    except NotFound:
        logger.warning("no profile of this machine: finetuning gets the slack behind the steps only")
        return MovingPredictor()
