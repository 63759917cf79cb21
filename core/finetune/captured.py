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
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from core.errors import HarliError
from core.finetune.fused import FusedStep, FusedWeights, LoraState, Work, pack_inputs
from core.intake.packing import MicroBatch
from core.policy.types import TaskletKind

_KINDS: dict[str, TaskletKind] = {
    "forward": "forward",
    "recompute": "forward",
    "head": "head",
    "backward": "backward",
    "optimizer": "optimizer",
}


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


class JobState:
    """A copy, on the device, of a job's LoRA between two tasklets; its methods may wait, and may run in any thread."""

    def __init__(self, lora: LoraState, dtype: torch.dtype) -> None:
        self._lora, self._dtype = lora, dtype
        self._flats = {
            "master": lora.masters.clone(),
            "exp_avg": lora.exp_avg.clone(),
            "exp_avg_sq": lora.exp_avg_sq.clone(),
        }
        self._step = lora.step.clone()
        self._copied = torch.cuda.Event()
        self._copied.record()

    def optimizer(self, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Masters and moments on the CPU by `LoraOptimizer.state`'s names, cut to the shapes of `like` (the job's LoRA
        parameters by peft's names)."""
        self._copied.synchronize()
        step = self._step.cpu()[0]
        state: dict[str, torch.Tensor] = {}
        for prefix, flat in self._flats.items():
            for name, value in self._lora.named(flat.cpu()):
                if name in like and (prefix == "master" or step > 0):
                    state[f"{prefix}.{name}"] = _corner(value, like[name])
        if step > 0:
            state |= {f"step.{name}": step.clone() for name in like}
        return state

    def adapter(self, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The LoRA parameters on the CPU by peft's names, in the model's dtype, cut to the shapes of `like`."""
        self._copied.synchronize()
        values = self._lora.named(self._flats["master"].cpu())
        return {name: _corner(value, like[name]).to(self._dtype) for name, value in values if name in like}


def _corner(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return value[: like.shape[0], : like.shape[1]].clone()


class CapturedTrainer:
    """A slot's static buffers and its graphs on each of `streams`; a partition is the place of its stream in there.

    capture_s: seconds that the capture took; memory_bytes: device memory that buffers and graphs took. Must be made on
    a thread that may synchronise the device. All methods but `JobState`'s return without waiting for the device.
    """

    def __init__(self, weights: FusedWeights, slot: Slot, streams: Sequence[torch.cuda.Stream]) -> None:
        self.slot = slot
        self.streams = tuple(streams)
        self._device = weights.embed.device
        began, free = time.perf_counter(), torch.cuda.mem_get_info(self._device)[0]
        with torch.inference_mode(False), torch.no_grad():
            self._fused = FusedStep(
                weights, rank=slot.rank, micro_batch_tokens=slot.micro_batch_tokens, recompute=slot.recompute
            )
            self._graphs = [self._capture(stream) for stream in self.streams]
            self._fused.lora.step.zero_()
        torch.cuda.synchronize(self._device)
        self.capture_s = time.perf_counter() - began
        self.memory_bytes = free - torch.cuda.mem_get_info(self._device)[0]
        self._program: tuple[Work, ...] = ()
        self._inputs: dict[int, torch.Tensor] = {}
        self._counts = 0, 0
        self._pending: deque[tuple[torch.cuda.Event, torch.Tensor, int, int, bool]] = deque()

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
        """Put a job into the slot, on the current stream; what was there is gone, an open step too.

        parameters: its LoRA parameters by peft's names (`core.finetune.lora.trainable`); state: where it left off
        (`JobState.optimizer`), which then counts; scaling: alpha / rank, or alpha / sqrt(rank) with rsLoRA. Raises
        `Invalid` when the slot's rank is too small.
        """
        lora, buffers = self._fused.lora, self._fused.buffers
        with torch.inference_mode(False), torch.no_grad():
            if state is None:
                lora.load(lora.masters, parameters)
                lora.exp_avg.zero_()
                lora.exp_avg_sq.zero_()
                lora.step.zero_()
            else:
                for prefix, flat in (
                    ("master", lora.masters), ("exp_avg", lora.exp_avg), ("exp_avg_sq", lora.exp_avg_sq)
                ):
                    named = {k.removeprefix(f"{prefix}."): v for k, v in state.items() if k.startswith(f"{prefix}.")}
                    lora.load(flat, named)
                lora.step.fill_(next((float(v) for k, v in state.items() if k.startswith("step.")), 0.0))
            lora.gradient.zero_()
            buffers.loss.zero_()
            self._constants = weight_decay, max_grad_norm, scaling
            buffers.scalars.copy_(torch.tensor([0.0, *self._constants, 1.0]))
            self._fused.publish()
        self._program = ()
        self._pending.clear()

    def job_state(self) -> JobState:
        """A copy of the job as the current stream sees it; to be taken between two optimizer steps."""
        return JobState(self._fused.lora, self._fused.weights.embed.dtype)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def load_step(self, batches: Sequence[MicroBatch], learning_rate: float) -> tuple[TaskletKind, ...]:
        """Make the micro-batches of one optimizer step the program and return its kinds."""
        return self._load(batches, learning_rate, train=True)

    def load_evaluation(self, batches: Sequence[MicroBatch]) -> tuple[TaskletKind, ...]:
        """Make the held-out micro-batches the program: forwards and heads only."""
        return self._load(batches, 0.0, train=False)

    def _load(self, batches: Sequence[MicroBatch], learning_rate: float, *, train: bool) -> tuple[TaskletKind, ...]:
        size = self.slot.micro_batch_tokens
        program: list[Work] = []
        self._inputs = {}
        for batch in batches:
            if len(batch.ids) != size:
                raise HarliError(
                    "micro_batch_size", f"a micro-batch of {len(batch.ids)} tokens came to a slot of {size}; pack to it"
                )
            inputs = pack_inputs(batch, self._fused.buffers.inputs.shape[1])
            self._inputs[len(program)] = inputs.pin_memory()
            program += [
                work
                for work in self._fused.micro_batch(batch.trained)
                if train or work.name in ("forward", "head")
            ]
        if train:
            program.append(Work("optimizer"))
        trained = max(1, sum(batch.trained for batch in batches))
        self._scalars = torch.tensor([learning_rate, *self._constants, 1.0 / trained]).pin_memory()
        self._program = tuple(program)
        self._counts = sum(batch.tokens for batch in batches), len(batches)
        return self.kinds()

    def kinds(self) -> tuple[TaskletKind, ...]:
        """The kinds of the loaded program's tasklets, in order."""
        return tuple(_KINDS[work.name] for work in self._program)

    def launch(self, partition: int, index: int) -> None:
        """Launch tasklet `index` of the program on the partition's stream; in order, each exactly once."""
        work, stream = self._program[index], self.streams[partition]
        buffers = self._fused.buffers
        with torch.cuda.stream(stream):
            if index == 0:
                buffers.scalars.copy_(self._scalars, non_blocking=True)
            if index in self._inputs:
                buffers.inputs.copy_(self._inputs[index], non_blocking=True)
            self._graphs[partition][work].replay()
            if index == len(self._program) - 1:
                self._report(work.name == "optimizer")

    def _report(self, trained: bool) -> None:
        buffers = self._fused.buffers
        if not trained:
            buffers.report[:1].copy_(buffers.loss)
            buffers.loss.zero_()
        report = torch.empty(2, pin_memory=True)
        report.copy_(buffers.report, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        self._pending.append((done, report, *self._counts, trained))

    def results(self) -> list[StepResult]:
        """The steps that have finished since the last call, in order."""
        finished = []
        while self._pending and self._pending[0][0].query():
            _, report, tokens, micro_batches, trained = self._pending.popleft()
            loss, norm = report.tolist()
            finished.append(StepResult(tokens, micro_batches, loss, norm if trained else None))
        return finished
