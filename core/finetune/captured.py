"""Finetuning as CUDA graphs: one graph per (partition, tasklet), over static buffers that all partitions share.

A `CapturedTrainer` is one slot of the start-up menu (`Slot`: LoRA rank, tokens of a micro-batch). It is made once, when
nothing else captures; jobs come and go by copying their state into it (`load_job`, `state`, `adapter`). Its tasklets
read and write explicit buffers only, so each may run on any partition: consecutive tasklets only have to be ordered,
which is the caller's to do with events when they go to different streams.

    trainer = CapturedTrainer(weights, Slot(16, 2048), [whole.stream, *(p.stream for p in partitions)])
    trainer.load_job(parameters, scaling=2.0, weight_decay=0.0, max_grad_norm=1.0)
    kinds = trainer.load_step(micro_batches, learning_rate=1e-4)  # one optimizer step's program
    for index in range(len(kinds)):
        trainer.launch(partition, index)  # asynchronous
    trainer.results()  # what has finished meanwhile, without a wait

The next step may be loaded and launched while the last one is still queued: its inputs travel behind it, in stream
order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import torch

from core.errors import HarliError
from core.finetune.fused import FusedStep, FusedWeights, LoraState, Shape, Work, pack_inputs
from core.finetune.streamed import StreamedBase, ready
from core.intake.packing import MicroBatch
from core.memory.slot import SlotMemory
from core.memory.staging import Staging, staging
from core.memory.swap import Swappable
from core.policy.types import TaskletKind

_KINDS: dict[str, TaskletKind] = {
    "forward": "forward",
    "recompute": "forward",
    "head": "head",
    "backward": "backward",
    "optimizer": "optimizer",
}


_TIMED = 5  # runs of a tasklet that is timed
_REPORTS = 8  # programs that end before anybody asks for results: more than are ever queued
# Work that computes with a layer's frozen weights.
_WITH_LAYER = ("forward", "recompute", "backward")
# Masters and moments, by the names that a checkpoint gives them.
_KEPT = ("master", "exp_avg", "exp_avg_sq")


class Slot(NamedTuple):
    """One entry of the start-up menu. Jobs of a smaller rank, or of fewer target modules, are padded with zeros, which
    stay zero; micro-batches are exactly `micro_batch_tokens` long. recompute: keep one layer's activations instead of
    all, at the price of a second forward."""

    rank: int
    micro_batch_tokens: int
    recompute: bool = False


class StepResult(NamedTuple):
    """What one loaded step came to. tokens: without padding; loss: nats per trained token; grad_norm: before clipping,
    None for an evaluation. An update whose norm is not finite was left out on the device."""

    tokens: int
    micro_batches: int
    loss: float
    grad_norm: float | None


class Program(NamedTuple):
    """The work of one optimizer step, or of one evaluation, with its inputs in pinned memory. kinds: of its tasklets;
    inputs: by the place of the tasklet that needs them."""

    work: tuple[Work, ...]
    kinds: tuple[TaskletKind, ...]
    inputs: dict[int, torch.Tensor]
    scalars: torch.Tensor
    tokens: int
    micro_batches: int
    trains: bool

    @property
    def layers(self) -> list[int]:
        """The layers that it computes with, in order."""
        return [work.part for work in self.work if work.name in _WITH_LAYER]


class _Report(NamedTuple):
    """Where the end of a program is told. values: its loss and norm, page-locked; written: when they are there."""

    values: torch.Tensor
    written: torch.cuda.Event


class JobState:
    """A job's LoRA as it is between two tasklets; its methods may wait, and may run in any thread.

    staging: the way off the device. away: what holds masters and moments when they are not on the device, or on their
    way; it is read when one of the methods asks for it first, and nothing may be launched until it is (`read`).
    Elsewhere a copy on the device is taken at once.
    """

    def __init__(self, lora: LoraState, dtype: torch.dtype, staging: Staging, away: Swappable | None) -> None:
        self._lora, self._dtype, self._staging, self._away = lora, dtype, staging, away
        flats = (lora.masters, lora.exp_avg, lora.exp_avg_sq)
        self._flats = [flat.clone() for flat in flats] if away is None else []
        self._step = lora.step.clone()
        self.copied = torch.cuda.current_stream(lora.step.device).record_event()

    @property
    def read(self) -> bool:
        """It no longer depends on memory that tasklets write."""
        return bool(self._flats)

    def _on_cpu(self, count: int) -> list[torch.Tensor]:
        """The first `count` of masters, first and second moments."""
        self.copied.synchronize()
        if self._away is None:
            return [self._staging.fetch(flat) for flat in self._flats[:count]]
        if not self._flats:
            self._flats = self._away.contents(range(3))
        return self._flats[:count]

    def optimizer(self, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Masters and moments on the CPU by the names of a checkpoint, cut to the shapes of `like` (the job's LoRA
        parameters by peft's names)."""
        flats = self._on_cpu(3)
        step = self._step.cpu()[0]
        state: dict[str, torch.Tensor] = {}
        for prefix, flat in zip(_KEPT, flats, strict=True):
            for name, value in self._lora.named(flat):
                if name in like and (prefix == "master" or step > 0):
                    state[f"{prefix}.{name}"] = _corner(value, like[name])
        if step > 0:
            state |= {f"step.{name}": step.clone() for name in like}
        return state

    def adapter(self, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The LoRA parameters on the CPU by peft's names, in the model's dtype, cut to the shapes of `like`."""
        values = self._lora.named(self._on_cpu(1)[0])
        return {name: _corner(value, like[name]).to(self._dtype) for name, value in values if name in like}


def _corner(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return value[: like.shape[0], : like.shape[1]].clone()


class CapturedTrainer:
    """A slot's static buffers and its graphs on each of `streams`; a partition is the place of its stream in there.

    memory: the part of the arena that the buffers lie in, mapped for the capture and from then on the caller's to map
    and unmap: tasklets are launched while all of it is `present`, a program from its beginning after it was mapped
    again. Without it they lie in torch's memory. streamed: where the weights are those of a base that is not served; it
    has to be loaded while tasklets are launched, each once its layer is `there`. relative: how many times as long as
    those of a profile its tasklets take, by kind, where they are not those that a profile was taken of. capture_s:
    seconds that the capture took; memory_bytes: device memory that buffers and graphs took. Must be made on a thread
    that may synchronise the device. All methods but `JobState`'s and `alone_ms` return without waiting for the device.
    """

    def __init__(
        self,
        weights: FusedWeights,
        slot: Slot,
        streams: Sequence[torch.cuda.Stream],
        memory: SlotMemory | None = None,
        streamed: StreamedBase | None = None,
    ) -> None:
        self.slot = slot
        self.streamed = streamed
        self.relative: Mapping[TaskletKind, float] = {}
        self.streams = tuple(streams)
        self._entered: int | None = None  # the partition whose stream is the current one, within `on`
        self._device = weights.embed.device
        began, free = time.perf_counter(), torch.cuda.mem_get_info(self._device)[0]
        self.memory = memory
        self._staging = staging(self._device)
        with torch.inference_mode(False), torch.no_grad():
            self._fused = FusedStep(
                weights,
                rank=slot.rank,
                micro_batch_tokens=slot.micro_batch_tokens,
                recompute=slot.recompute,
                place=memory,
            )
            if memory is not None:
                memory.map()
            self._mapping = memory.mappings if memory is not None else 0
            self._graphs = [self._capture(stream) for stream in self.streams]
            self._fused.lora.step.zero_()
        torch.cuda.synchronize(self._device)
        self.capture_s = time.perf_counter() - began
        self.memory_bytes = free - torch.cuda.mem_get_info(self._device)[0]
        if memory is not None:  # mapped from pages that the arena had
            self.memory_bytes += memory.bytes
        self._constants = 0.0, 0.0, 0.0
        self._program: Program | None = None
        self._pending: deque[tuple[_Report, Program]] = deque()
        self._reports = [_new_report() for _ in range(_REPORTS)]  # not in use: page-locking takes longer than a launch
        # What the next tasklet has to wait for besides the ones before it: state that is copied in or out.
        self._copied: torch.cuda.Event | None = None

    def _capture(self, stream: torch.cuda.Stream) -> dict[Work, torch.cuda.CUDAGraph]:
        """Every piece of work once for real, so that kernels are compiled and libraries have their workspaces on this
        stream, then once into a graph. Buffers are zero, so that running them is harmless."""
        graphs: dict[Work, torch.cuda.CUDAGraph] = {}
        pool = torch.cuda.graph_pool_handle()  # of this stream alone: graphs of two streams may run together
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for work in self._fused.every_work():
                self._fused.run(work)
            stream.synchronize()
            for work in self._fused.every_work():
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream, pool=pool, capture_error_mode="thread_local"):
                    self._fused.run(work)
                # The first launch of a graph uploads it, which must not happen on the step path.
                graph.replay()
                graphs[work] = graph
        torch.cuda.current_stream(self._device).wait_stream(stream)
        return graphs

    @property
    def shape(self) -> Shape:
        """Of the model."""
        return self._fused.weights.shape

    def alone_ms(self) -> dict[TaskletKind, float]:
        """Median ms of a tasklet of each kind on the first stream, over whatever the buffers hold; of the optimizer's
        too, so that a job has to be loaded anew. Waits for the device."""
        kinds: dict[TaskletKind, float] = {}
        stream = self.streams[0]
        for name, kind in _KINDS.items():
            graph = self._graphs[0].get(Work(name))  # type: ignore[arg-type]
            if graph is None or kind in kinds:
                continue
            moments = [torch.cuda.Event(enable_timing=True) for _ in range(_TIMED + 1)]  # type: ignore[no-untyped-call]
            with self.on(0):
                for moment in moments:
                    graph.replay()
                    moment.record(stream)
            moments[-1].synchronize()
            kinds[kind] = median(one.elapsed_time(other) for one, other in pairwise(moments))
        return kinds

    @property
    def heads(self) -> int:
        """Tasklets of the head of a micro-batch that is trained in all positions."""
        return sum(work.name == "head" for work in self._fused.every_work())

    # ---- jobs --------------------------------------------------------------------------------------------------------

    def load_job(
        self,
        parameters: Mapping[str, torch.Tensor],
        *,
        scaling: float,
        weight_decay: float,
        max_grad_norm: float,
        state: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Put a job into the slot; what was there is gone, an open step too. Waits, on the device, for what is queued,
        and the next tasklet for this. May be called from any thread while nothing is launched.

        parameters: its LoRA parameters by peft's names (`core.finetune.lora.trainable`); state: where it left off
        (`JobState.optimizer`), which then counts; scaling: alpha / rank, or alpha / sqrt(rank) with rsLoRA. Raises
        `Invalid` when the slot's rank is too small.
        """
        lora = self._fused.lora
        current = torch.cuda.current_stream(self._device)
        for stream in self.streams:
            current.wait_stream(stream)
        content = state if state is not None else {f"master.{n}": self._staging.fetch(v) for n, v in parameters.items()}
        with torch.inference_mode(False), torch.no_grad():
            places = [lora.masters, lora.exp_avg, lora.exp_avg_sq]
            flats = [torch.zeros(place.shape) for place in places]
            for prefix, flat in zip(_KEPT, flats, strict=True):
                begins = f"{prefix}."
                lora.load(flat, {k.removeprefix(begins): v for k, v in content.items() if k.startswith(begins)})
            if self.memory is not None:  # which may be away, or be moved while this goes on
                self.memory.state.put(flats)
            else:
                for place, flat in zip(places, flats, strict=True):
                    self._staging.store(place, flat)
            lora.step.fill_(next((float(v) for k, v in content.items() if k.startswith("step.")), 0.0))
            self._constants = weight_decay, max_grad_norm, scaling
            if self.memory is None:
                self._fused.buffers.scalars.copy_(torch.tensor([0.0, *self._constants, 1.0]))
                self._begin()
            else:  # when it is launched, since the buffers may not be there, or be on their way
                self._mapping = -1
        self._copied = current.record_event()
        self._program = None
        self._reports += [report for report, _ in self._pending]
        self._pending.clear()

    def _begin(self) -> None:
        """Make what is not kept of a job: nothing is computed yet, and the working copy is that of the masters."""
        self._fused.lora.gradient.zero_()
        self._fused.buffers.loss.zero_()
        self._fused.publish()
        self._mapping = self.memory.mappings if self.memory is not None else 0

    def leave_off(self, partition: int) -> torch.cuda.Event:
        """Launch nothing more of the program, or all of it from its beginning. Answers when everything that was
        launched is through; partition: where the last tasklet was launched."""
        if self.streamed is not None:
            window = self.streamed.window
            self.streams[partition].wait_event(window.stop())  # type: ignore[arg-type]
            window.follow(self._program.layers if self._program is not None else ())
        event: torch.cuda.Event = self.streams[partition].record_event()
        return event

    def job_state(self, partition: int = 0, *, away: bool = False) -> JobState:
        """The job as it will be when what was launched is through; to be taken between two optimizer steps.
        partition: where the last tasklet was launched; away: its memory is not all there, or on its way, and nothing is
        launched before this is `read`."""
        with torch.cuda.stream(self.streams[partition]), torch.inference_mode(False):
            if self._copied is not None:
                self.streams[partition].wait_event(self._copied)
            kept = self.memory.state if away and self.memory is not None else None
            state = JobState(self._fused.lora, self._fused.weights.embed.dtype, self._staging, kept)
        self._copied = state.copied
        return state

    # ---- steps -------------------------------------------------------------------------------------------------------

    def program(self, batches: Sequence[MicroBatch], learning_rate: float | None) -> Program:
        """The program of one optimizer step over these micro-batches; without a learning rate that of an evaluation,
        forwards and heads only. May be made in any thread, ahead of need."""
        size = self.slot.micro_batch_tokens
        work: list[Work] = []
        inputs: dict[int, torch.Tensor] = {}
        for batch in batches:
            if len(batch.ids) != size:
                raise HarliError(
                    "micro_batch_size", f"a micro-batch of {len(batch.ids)} tokens came to a slot of {size}; pack to it"
                )
            inputs[len(work)] = pack_inputs(batch, self._fused.buffers.inputs.shape[1]).pin_memory()
            parts = self._fused.micro_batch(batch.trained)
            work += parts if learning_rate is not None else [p for p in parts if p.name in ("forward", "head")]
        if learning_rate is not None:
            work.append(Work("optimizer"))
        trained = max(1, sum(batch.trained for batch in batches))
        return Program(
            work=tuple(work),
            kinds=tuple(_KINDS[one.name] for one in work),
            inputs=inputs,
            scalars=torch.tensor([learning_rate or 0.0, *self._constants, 1.0 / trained]).pin_memory(),
            tokens=sum(batch.tokens for batch in batches),
            micro_batches=len(batches),
            trains=learning_rate is not None,
        )

    def load(self, program: Program) -> tuple[TaskletKind, ...]:
        """Make it the program whose tasklets `launch` launches; returns their kinds."""
        self._program = program
        if self.streamed is not None:
            self.streamed.window.follow(program.layers)
        return program.kinds

    def load_step(self, batches: Sequence[MicroBatch], learning_rate: float) -> tuple[TaskletKind, ...]:
        """`load` of one optimizer step."""
        return self.load(self.program(batches, learning_rate))

    def load_evaluation(self, batches: Sequence[MicroBatch]) -> tuple[TaskletKind, ...]:
        """`load` of one evaluation."""
        return self.load(self.program(batches, None))

    def kinds(self) -> tuple[TaskletKind, ...]:
        """The kinds of the loaded program's tasklets, in order."""
        return self._program.kinds if self._program is not None else ()

    def there(self, kinds: Sequence[TaskletKind]) -> int:
        """How many of the tasklets that come next, of these kinds, may be launched: all of them, but where layers are
        streamed. Its memory has to be present."""
        if self.streamed is None:
            return len(kinds)
        self.streamed.window.feed()
        return ready(self.streamed.window, kinds)

    @contextmanager
    def on(self, partition: int) -> Iterator[None]:
        """The partition's stream is the current one: whoever launches several tasklets there has it entered once, which
        takes longer than a launch."""
        outside, before = self._entered, torch.cuda.current_stream(self._device)
        torch.cuda.set_stream(self.streams[partition])
        self._entered = partition
        try:
            yield
        finally:
            self._entered = outside
            torch.cuda.set_stream(before)

    def launch(self, partition: int, index: int) -> None:
        """Launch tasklet `index` of the program on the partition's stream; in order, each exactly once."""
        if self._entered == partition:
            self._launch(partition, index)
        else:
            with self.on(partition):
                self._launch(partition, index)

    def _launch(self, partition: int, index: int) -> None:
        """`launch` with the stream entered."""
        program, stream = self._program, self.streams[partition]
        assert program is not None
        buffers = self._fused.buffers
        if self._copied is not None:
            stream.wait_event(self._copied)
            self._copied = None
        if index == 0:
            buffers.scalars.copy_(program.scalars, non_blocking=True)
            if self.memory is not None and self._mapping != self.memory.mappings:
                with torch.inference_mode(False), torch.no_grad():
                    self._begin()
        if index in program.inputs:
            buffers.inputs.copy_(program.inputs[index], non_blocking=True)
        work = program.work[index]
        window = self.streamed.window if self.streamed is not None and work.name in _WITH_LAYER else None
        if window is not None:
            window.enter(stream)
        self._graphs[partition][work].replay()
        if window is not None:
            window.leave(stream)
        if index == len(program.work) - 1:
            self._report(program, stream)

    def _report(self, program: Program, stream: torch.cuda.Stream) -> None:
        buffers = self._fused.buffers
        if not program.trains:
            buffers.report[:1].copy_(buffers.loss)
            buffers.loss.zero_()
        report = self._reports.pop() if self._reports else _new_report()
        report.values.copy_(buffers.report, non_blocking=True)
        report.written.record(stream)
        self._pending.append((report, program))

    @property
    def pending(self) -> int:
        """Programs that were launched to their end and not yet told of by `results`."""
        return len(self._pending)

    def results(self) -> list[StepResult]:
        """The steps that have finished since the last call, in order."""
        finished = []
        while self._pending and self._pending[0][0].written.query():  # type: ignore[no-untyped-call]
            report, program = self._pending.popleft()
            loss, norm = report.values.tolist()
            self._reports.append(report)
            norm = norm if program.trains else None
            finished.append(StepResult(program.tokens, program.micro_batches, loss, norm))
        return finished


def _new_report() -> _Report:
    with torch.inference_mode(False):
        return _Report(torch.empty(2, pin_memory=True), torch.cuda.Event())  # type: ignore[no-untyped-call]
