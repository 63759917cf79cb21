"""The runtime inside SGLang's scheduler: what of the scheduler it reads, and how a job's trainer is built there."""

from __future__ import annotations

import os
import platform
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import zmq

from core.config import Settings
from core.errors import Invalid
from core.finetune.captured_job import CapturedJob
from core.finetune.metered import MeteredTrainer
from core.finetune.streamed import StreamedBase
from core.finetune.trainer import Trainer
from core.finetune.views import shared_model
from core.intake import packing
from core.intake import tokenizer as intake_tokenizer
from core.intake.chat import Encoded
from core.link.messages import Hello, StartJob
from core.link.transport import EngineEnd
from core.memory.rate import Rate
from core.memory.slot import TorchMemory
from core.runtime.memory import Broker
from core.runtime.runtime import Load, Prepared, Runtime
from core.serving import activation, exchange
from core.serving.bases import Bases
from core.serving.elastic import elastic_kv
from core.serving.plugin import ENGINE_ID
from core.serving.versions import in_force, versions

_HEALTH_CHECK = "HEALTH_CHECK"
# Bounds of steps and tasklets are of their 99th percentiles already. What they do not know is when the scheduler's
# thread gets to hand tokens on: on an H200 that puts decode's p99 0.3 ms over its p50 of 7. Eagerly it also computes.
_CAPTURED_MARGIN, _EAGER_MARGIN = 0.05, 0.15


class Attachment:
    """Binds a `Runtime` to one SGLang scheduler (0.5.16) and translates between the two."""

    def __init__(self, scheduler: Any) -> None:
        settings = Settings()
        arguments = scheduler.server_args
        if arguments.tp_size != 1 or arguments.pp_size != 1:
            raise Invalid(
                "tensor_parallel",
                f"co-location needs the whole model on one device, not tensor parallel {arguments.tp_size} × pipeline "
                f"parallel {arguments.pp_size}; start one engine per GPU",
                "engine",
            )
        self._scheduler = scheduler
        model = scheduler.tp_worker.model_runner.model
        model_path = Path(arguments.model_path)
        self._shared = shared_model(model, model_path)
        self._model_path = model_path
        device = self._shared.model.embed_tokens.weight.device
        self._adapters: dict[str, str] = {}
        self._starting = True  # until the last request of the engine's own has been decoded
        self._prefills = arguments.disaggregation_mode != "decode"
        self._kv = elastic_kv(scheduler)
        self._broker = Broker(self._kv) if self._kv is not None else None
        self._bases = Bases(
            settings,
            served=arguments.served_model_name,
            dtype=self._shared.dtype,
            most_bytes=self._broker.most_bytes if self._broker is not None else None,
        )
        self._queue = None
        if device.type == "cuda" and settings.engine.captured:
            from core.serving.queue import DecodeQueue

            self._queue = DecodeQueue(scheduler, self._shared, settings, self._kv, self._bases)
        captured = self._queue is not None
        self._policy = settings.finetune.policy or ("hybrid" if captured else "tasklet_slices")
        margin = settings.finetune.margin
        self._margin = margin if margin is not None else (_CAPTURED_MARGIN if captured else _EAGER_MARGIN)
        hello = self._hello(settings, device)
        link = EngineEnd(settings.resolved_link_url, hello.engine_id)
        watch = None
        if device.type == "cuda":
            from core.runtime.gpu_watch import GpuWatch

            watch = GpuWatch(device.index or 0)
            watch.start()
        self.runtime = Runtime(
            Prepared(
                hello=hello,
                device=device,
                prepare=self._prepare,
                queued=self._queue.queued if self._queue is not None else None,
                profiling=self._queue.profiling if self._queue is not None else None,
                memory=self._broker,
                gpu=watch,
                announced=self._queue.give_memory_back if self._queue is not None else lambda: None,
            ),
            link,
            policy=self._policy,
            margin=self._margin,
            calibration_prefix=activation.CALIBRATION_PREFIX,
        )
        if scheduler.idle_sleeper is not None:
            # An idle scheduler sleeps until one of its sockets has something; orders from the link count too.
            for socket in link.wake_sockets:
                scheduler.idle_sleeper.poller.register(socket, zmq.POLLIN)
        signal.signal(signal.SIGTERM, self._leave)
        profiler = self._queue.profiling.profiler if self._queue is not None else None
        batches, steps = (profiler.batches, profiler.steps) if profiler is not None else ((), 0)
        activation.report(settings.data_dir, activation.Active(hello, batches, steps))

    # ---- step path ---------------------------------------------------------------------------------------------------

    def between_batches(self) -> None:
        """No batch is being made; one may still run on the device."""
        if self._kv is not None:
            self.runtime.between_batches()
            self._kv.advance()

    def request_came(self) -> None:
        """A request was queued; no batch is being made."""
        if self._kv is not None:
            self.runtime.request_came()

    def step_begins(self, batch: Any) -> None:
        """A batch is about to be launched."""
        if batch.forward_mode.is_extend():
            self.runtime.prefill_begins()
        elif self._queue is not None and batch.forward_mode.is_decode():
            self.runtime.decode_begins(self._load(batch.reqs))
        else:
            self.runtime.step_begins()

    def step_launched(self, batch: Any) -> None:
        """That batch is launched; its result may come later."""
        if self._queue is not None and batch.forward_mode.is_decode():
            self.runtime.decode_launched()

    def step_ended(self, batch: Any) -> None:
        """A batch's result has been processed and its tokens sent on."""
        mode = batch.forward_mode
        if mode.is_decode():
            ran = [r for r in batch.reqs if not r.is_retracted]
            self.runtime.decode_ended([(r.rid, r.finished()) for r in ran], self._load(), self._adapters_of(ran))
            if self._starting and any(r.rid == activation.CALIBRATION_END for r in ran):
                self._starting = False
                self.runtime.finish_calibration()
        elif mode.is_extend():
            first = [
                (r.rid, r.time_stats.scheduler_recv_time)
                for r in batch.reqs
                if len(r.output_ids) == 1 and not r.rid.startswith(_HEALTH_CHECK)
            ]
            self.runtime.prefill_ended(first, self._load())

    def idle(self) -> bool:
        """Nothing is to be launched; True when finetuning took the time."""
        if not self._scheduler.is_fully_idle():
            return False
        # The engine does not sleep while memory is on its way.
        trained = self.runtime.idle(self._load())
        moving = self._kv is not None and not self._kv.settled
        return trained or moving or (self._broker is not None and self._broker.due)

    def _load(self, requests: Any = None) -> Load:
        """The engine with `requests` running, by default those that go on after this step."""
        scheduler = self._scheduler
        running = requests if requests is not None else [r for r in scheduler.running_batch.reqs if not r.finished()]
        lengths = [len(r.origin_input_ids) + len(r.output_ids) for r in running]
        total = scheduler.max_total_num_tokens if self._kv is None else self._kv.size
        free = scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()
        return Load(
            running=[r.rid for r in running],
            waiting=len(scheduler.waiting_queue),
            prefill_waiting=sum(len(r.origin_input_ids) for r in scheduler.waiting_queue) if self._prefills else 0,
            kv_tokens=sum(lengths),
            max_kv=max(lengths, default=0),
            kv_used=total - free,
            kv_total=total,
            adapters=self._adapters_of(running),
        )

    def _adapters_of(self, requests: Sequence[Any]) -> Sequence[str | None]:
        """What each request is served with, when that matters."""
        return [self._adapter(r.lora_id) for r in requests] if self.runtime.asks_for_adapters else ()

    def _adapter(self, lora_id: str | None) -> str | None:
        """The name under which the adapter with SGLang's id is served; an id is never given twice."""
        if lora_id is None:
            return None
        name = self._adapters.get(lora_id)
        if name is None:
            reference = self._scheduler.tp_worker.model_runner.lora_manager.lora_refs.get(lora_id)
            name = exchange.name_of(reference.lora_name) if reference is not None else None
            if name is not None:
                self._adapters[lora_id] = name
        return name

    # ---- jobs --------------------------------------------------------------------------------------------------------

    def _prepare(self, order: StartJob) -> Trainer | CapturedJob:
        """Runs in the job's thread: read and tokenise the rows, wrap the model."""
        spec = order.spec
        path = Path(spec.dataset_path)
        model_path = self._model_path if spec.base_model is None else self._bases.get(spec.base_model).path
        rows = packing.load_encoded(path, intake_tokenizer.load(model_path))
        packing.check_lengths(
            path,
            [len(row.ids) for row in rows],
            micro_batch_tokens=spec.micro_batch_tokens,
            sequence_length=spec.sequence_length,
        )
        if spec.base_model is not None:
            return self._prepare_streamed(order, rows, spec.base_model)
        name, resume = self._model_path.name, Path(order.resume_from) if order.resume_from else None
        broker = self._broker
        if self._queue is not None:
            trainer = self._queue.trainer
            slot = trainer.memory
            share = (lambda: broker.slot_share(slot)) if broker is not None and slot is not None else None
            return CapturedJob(trainer, self._shared, spec, rows, base_name=name, resume_from=resume, new_share=share)
        if broker is None:
            return Trainer(self._shared, spec, rows, base_name=name, resume_from=resume)
        return MeteredTrainer(
            self._shared,
            spec,
            rows,
            base_name=name,
            resume_from=resume,
            new_share=lambda state: broker.share(spec.job_id, state, self._shared.parameters()),
        )

    def _prepare_streamed(self, order: StartJob, rows: Sequence[Encoded], name: str) -> Trainer | CapturedJob:
        """A job on a base of its own, whose weights are read into host memory first."""
        spec, broker = order.spec, self._broker
        resume = Path(order.resume_from) if order.resume_from else None
        if self._queue is not None:
            trainer = self._queue.streamed[name]
            base, slot = trainer.streamed, trainer.memory
            assert base is not None and slot is not None and broker is not None
            base.load()
            try:
                return CapturedJob(
                    trainer, base.model, spec, rows, base_name=name, resume_from=resume,
                    new_share=lambda: broker.slot_share(slot),
                )  # fmt: skip
            except BaseException:
                base.unload()
                raise
        device = self._shared.model.embed_tokens.weight.device
        frozen = broker.frozen(spec.job_id) if broker is not None else None
        base = StreamedBase(
            self._bases.get(name),
            self._bases.window_layers,
            frozen.take if frozen is not None else TorchMemory(device).buffer,
            device=device,
            mappings=(lambda: frozen.mappings) if frozen is not None else lambda: 0,
            rate=broker.rate if broker is not None else Rate(),
        )
        base.load()
        try:
            if broker is None:
                return Trainer(base.model, spec, rows, base_name=name, resume_from=resume, streamed=base)
            return MeteredTrainer(
                base.model, spec, rows, base_name=name, resume_from=resume, streamed=base,
                new_share=lambda state: broker.share(spec.job_id, state, base.model.parameters(), frozen),
            )  # fmt: skip
        except BaseException:
            base.unload()
            raise

    # ---- start and end -----------------------------------------------------------------------------------------------

    def _hello(self, settings: Settings, device: torch.device) -> Hello:
        scheduler, arguments = self._scheduler, self._scheduler.server_args
        cuda = device.type == "cuda"
        return Hello(
            engine_id=os.environ[ENGINE_ID],
            pid=os.getpid(),
            http_url=settings.engine_url,
            model=arguments.served_model_name,
            model_path=str(self._model_path),
            device=device.type,
            device_name=torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine(),
            dtype=str(self._shared.dtype).removeprefix("torch."),
            # A head that is tied to the embedding is the same memory once more.
            parameters=sum({p.data_ptr(): p.numel() for p in self._shared.parameters()}.values()),
            versions=versions(),
            max_lora_rank=arguments.max_lora_rank,
            lora_modules=tuple(sorted(arguments.lora_target_modules)),
            kv_tokens=scheduler.max_total_num_tokens,
            max_running_requests=scheduler.max_running_requests,
            partitions=self._queue.layouts if self._queue is not None else ("whole",),
            finetune_slot=self._queue.slot if self._queue is not None else None,
            base_models=self._bases.told(),
            policy=self._policy,
            margin=self._margin,
            settings=in_force(arguments, settings),
        )

    def _leave(self, signum: int, frame: Any) -> None:
        """SIGTERM: the event loop ends after the step that runs now, and the runtime closes behind it."""
        self._scheduler.gracefully_exit = True
