"""What an engine on a GPU has for finetuning beside decode: partitions, decode graphs in each, captured tasklets, the
executor over them, and the profile of it all. Made once, before the scheduler's loop begins, since capturing takes
seconds."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pynvml
import torch

from core.config import Settings
from core.errors import HarliError, Unavailable
from core.finetune.base_folder import BaseFolder
from core.finetune.captured import CapturedTrainer, Slot
from core.finetune.fused import FusedWeights
from core.finetune.random_work import RandomWork
from core.finetune.streamed import StreamedBase
from core.memory.arena import ArenaError
from core.memory.rate import GPU_RATE
from core.memory.slot import SlotMemory
from core.partition import green
from core.policy.types import TaskletKind
from core.predictor.profile import Machine, MicroBatch
from core.runtime.executor import Executor, Expectation
from core.runtime.predicted import Predicted
from core.runtime.profiles import PROFILES, ProfileStore, Profiling
from core.runtime.profiling import Profiler
from core.runtime.runtime import Queued
from core.serving import activation
from core.serving.bases import Bases
from core.serving.layouts import DecodeLayouts
from core.serving.versions import SGLANG

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from core.serving.elastic import ElasticKV

logger = logging.getLogger(__name__)

_MOST_KV_TOKENS = 131_072  # of a measured batch: their prefill takes seconds
_KV_SHARE = 0.9  # of the KV cache that a measured batch may fill


class DecodeQueue:
    """Raises `UnsupportedWeights` for a model that captured tasklets do not know, `Unavailable` for an engine without
    decode graphs or overlap; ``HARLI_ENGINE__CAPTURED=false`` finetunes both eagerly.

    kv: the elastic KV cache, where there is one: the tasklets' buffers then lie on its arena. bases: those that jobs
    may finetune too, each of which gets tasklets of its own, in `streamed`; one that cannot is refused. profiling: the
    predictor and the profile that it is fitted to.
    """

    def __init__(
        self, scheduler: Any, shared: PreTrainedModel, settings: Settings, kv: ElasticKV | None, bases: Bases
    ) -> None:
        if not scheduler.enable_overlap:
            raise Unavailable(
                "engine_mode",
                "captured tasklets are queued behind the launches of SGLang's overlap scheduler; start the engine "
                "without disable_overlap_schedule, or with HARLI_ENGINE__CAPTURED=false",
                "engine",
            )
        runner = scheduler.tp_worker.model_runner
        self._device = device = shared.model.embed_tokens.weight.device
        partitions = green.make(device, settings.engine.partitions)
        decode = DecodeLayouts(runner, partitions)
        streams = list(dict.fromkeys(part.finetune for part in partitions.parts))
        slot = Slot(scheduler.server_args.max_lora_rank, settings.finetune.micro_batch_tokens)
        memory = SlotMemory(kv.arena, kv.make_room) if kv is not None else None
        self.trainer = CapturedTrainer(FusedWeights.of(runner.model, shared), slot, streams, memory)
        self.streamed = self._capture_streamed(bases, slot, streams, kv)
        kv_tokens = kv.size if kv is not None else scheduler.max_total_num_tokens
        self.layouts = tuple(green.describe(partitions))
        self.slot = slot.rank, slot.micro_batch_tokens
        finetune = {part.layout: part.finetune for part in partitions.parts}

        def new_executor(expectation: Expectation) -> Executor:
            return Executor(
                scheduler.forward_stream,
                finetune,
                select=decode.select,
                new_event=lambda: torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
                expectation=expectation,
            )

        places = {part.layout: streams.index(part.finetune) for part in partitions.parts}
        self.queued = Queued(new_executor(Predicted(lambda: self.profiling.predictor)), places, decode.padded)
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
        shape = self.trainer.shape
        model = scheduler.server_args.served_model_name
        store = ProfileStore(settings.data_dir / PROFILES, _machine(partitions.sms, model, shared.dtype))
        micro_batch = MicroBatch(
            tokens=slot.micro_batch_tokens, rank=slot.rank, layers=shape.layers, heads=self.trainer.heads
        )

        def new_profiler() -> Profiler:
            return Profiler(
                new_executor,
                finetune,
                RandomWork(self.trainer, places, shape.vocabulary),
                machine=store.machine,
                micro_batch=micro_batch,
                captured=decode.sizes,
                kv_heads=shape.kv_heads,
                room=(scheduler.max_req_len, min(int(_KV_SHARE * kv_tokens), _MOST_KV_TOKENS)),
            )

        self.profiling = Profiling(
            store, partitions.layouts, decode.sizes, micro_batch, new_profiler, activation.profile_batch
        )

    def _capture_streamed(
        self, bases: Bases, slot: Slot, streams: list[torch.cuda.Stream], kv: ElasticKV | None
    ) -> dict[str, CapturedTrainer]:
        """Tasklets of each base by its name. The served model's give their memory back meanwhile: a job has one."""
        made: dict[str, CapturedTrainer] = {}
        if not list(bases):
            return made
        served_ms = self.trainer.alone_ms()
        self.give_memory_back()
        for folder in bases:
            try:
                made[folder.name] = self._capture_base(folder, bases, slot, streams, kv, served_ms)
            except (HarliError, ArenaError, torch.OutOfMemoryError) as error:
                bases.refuse(folder.name, str(error))
        if kv is not None and self.trainer.memory is not None:
            self.trainer.memory.map()
            kv.take_room_back()  # which the profile measures
        return made

    def _capture_base(
        self,
        folder: BaseFolder,
        bases: Bases,
        slot: Slot,
        streams: list[torch.cuda.Stream],
        kv: ElasticKV | None,
        served_ms: Mapping[TaskletKind, float],
    ) -> CapturedTrainer:
        """Tasklets over a window of `folder`'s layers; served_ms: what the served model's take. Raises `HarliError`
        where a job cannot have them."""
        if kv is None:
            raise Unavailable(
                "no_arena",
                "captured tasklets of another base than the served one lie on the arena; start the engine with "
                "HARLI_ENGINE__ELASTIC_KV=true",
                "engine.elastic_kv",
            )
        memory = SlotMemory(kv.arena, kv.make_room)
        base = StreamedBase(
            folder,
            bases.window_layers,
            memory.buffer,
            device=self._device,
            mappings=lambda: memory.mappings,
            rate=GPU_RATE,
        )
        weights = base.fused()
        try:
            trainer = CapturedTrainer(weights, slot, streams, memory, base)
            trainer.relative = {kind: ms / served_ms[kind] for kind, ms in trainer.alone_ms().items()}
        finally:
            torch.cuda.synchronize(self._device)
            memory.unmap()
        bases.check_bytes(folder, memory.bytes)
        logger.warning(
            "%s; its tasklets took %.1f s to capture and, while a job runs, take %.2f GiB",
            base.told(),
            trainer.capture_s,
            memory.bytes / 2**30,
        )
        return trainer

    def give_memory_back(self) -> None:
        """The profile is taken, if it was to be: until a job comes, the KV cache has the slot's part of the arena."""
        memory = self.trainer.memory
        if memory is not None:
            torch.cuda.synchronize(self._device)
            memory.unmap()


def _machine(sms: int, model: str, dtype: torch.dtype) -> Machine:
    pynvml.nvmlInit()
    return Machine(
        gpu=torch.cuda.get_device_name(),
        sms=sms,
        driver=pynvml.nvmlSystemGetDriverVersion(),
        model=model,
        engine=f"sglang {SGLANG}",
        dtype=str(dtype).removeprefix("torch."),
    )
