"""One finetuning job as a sequence of tasklets that somebody else paces.

`Trainer` does not loop, wait or write files: `upcoming` says what comes next, `run_next` runs one tasklet, and what is
worth telling (`Metric`) is collected by `take_metrics`. Checkpoints are taken by `snapshot` at optimizer-step ends and
written by whoever holds it.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from core.errors import HarliError, Invalid
from core.finetune import checkpoint, evaluation, lora, schedule
from core.finetune.batch import PackedBatch
from core.finetune.checkpoint import Progress
from core.finetune.optimizer import LoraOptimizer
from core.finetune.streamed import StreamedBase, ready
from core.finetune.tasklets import DropoutSeed, MicroBatchRun, Tasklet
from core.intake import packing
from core.intake.chat import Encoded
from core.link.messages import JobSpec
from core.memory.moment import Moment
from core.policy.types import TaskletKind

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# What of a job does not shape its updates.
_UNRELATED = frozenset(
    {
        "job_id", "tenant", "dataset_path", "output_dir", "priority", "checkpoint_every", "adapter_name", "patience",
        "keep_best", "sample",
    }
)  # fmt: skip


class Metric(NamedTuple):
    """One optimizer step (`loss`, nats per trained token) or one evaluation (`eval_loss`); `tokens` counts from the
    job's start, without padding."""

    step: int
    epoch: float
    tokens: int
    loss: float | None = None
    eval_loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None


class Snapshot(NamedTuple):
    """A consistent copy of a job between two optimizer steps, on the CPU; `write` may run in any thread."""

    progress: Progress
    optimizer: dict[str, torch.Tensor]
    save_adapter: Callable[[Path], None]

    def write(self, output_dir: Path) -> Path:
        """Write it as a checkpoint under `output_dir` and return the checkpoint's folder."""
        folder = output_dir / "checkpoints"
        path = checkpoint.write(folder, self.progress, self.optimizer, self.save_adapter)
        checkpoint.prune(folder, keep=2)
        return path


class NotFinite(HarliError):
    """The loss or the gradient is no longer a number."""


class Trainer:
    """`spec` trained on `rows` over `model` (frozen, as `views.shared_model` gives it).

    streamed: where that is its model, a base that is not served, loaded; it is unloaded when the job is closed. Raises
    `Invalid` for rows that no micro-batch holds, for an empty data set and for a checkpoint of another job.
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
    ) -> None:
        self.spec = spec
        self._streamed = streamed
        self._rows = rows
        self._chunk = _head_chunk(model, spec.micro_batch_tokens)
        self._base = model
        train, evaluation = packing.split(len(rows), spec.evaluation_fraction, spec.seed)
        if len(train) == 0:
            raise Invalid("empty_dataset", "the data set has no row to train on; add rows", "dataset")
        self._packs = _packs(spec, rows, train)
        self._packs_per_epoch = len(_epoch(spec, rows, train, 0))
        self._eval_packs = _epoch(spec, rows, evaluation, 0)
        self.total_steps = math.ceil(len(self._packs) / spec.accumulation)
        self._warmup = round(spec.warmup_ratio * self.total_steps)
        self.progress = Progress(fingerprint=_fingerprint(spec, rows))
        state = None
        if resume_from is not None:
            self.progress, state = checkpoint.read(resume_from, self.progress.fingerprint)
        initial = Path(spec.initial_adapter) if spec.initial_adapter is not None else None
        self._model = lora.wrap(model, spec.lora, seed=spec.seed, base_name=base_name, initial=initial)
        self._device = next(model.parameters()).device
        parameters = lora.trainable(self._model)
        self._layer_parameters = _by_layer(parameters, len(model.model.layers))
        self._optimizer = LoraOptimizer(parameters, weight_decay=spec.weight_decay, max_grad_norm=spec.max_grad_norm)
        if state is not None:
            self._optimizer.restore(state)
        self._metrics: list[Metric] = []
        self._queue: deque[Tasklet] = deque()
        self._queue_tokens = 0.0
        self._refill()

    # ---- pacing ------------------------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """All steps and the last evaluation are through."""
        return not self._queue

    @property
    def stopped_early(self) -> bool:
        """Evaluations brought no improvement for as long as the job has patience."""
        return evaluation.exhausted(self.progress, self.spec)

    def upcoming(self, count: int) -> tuple[TaskletKind, ...]:
        """The kinds of the next tasklets, at most `count`, up to the end of the open micro-batch or step; of a base
        that is streamed to a GPU those whose layers are there."""
        kinds = tuple(tasklet.kind for tasklet in islice(self._queue, count))
        if self._streamed is None or self._device.type == "cpu" or not self._present:
            return kinds
        self._streamed.window.feed()
        return kinds[: ready(self._streamed.window, kinds)]

    @property
    def _present(self) -> bool:
        """Its memory is there."""
        return True

    @property
    def tokens_per_tasklet(self) -> float:
        """Tokens (without padding) of the open micro-batch, shared out over its tasklets."""
        return self._queue_tokens

    def run_next(self) -> TaskletKind:
        """Run one tasklet. Raises `NotFinite` and whatever the device raises; the job is then to be closed."""
        tasklet = self._queue.popleft()
        with torch.inference_mode(False), torch.enable_grad():
            tasklet.run()
            if not self._queue:
                self._refill()
        return tasklet.kind

    def take_metrics(self) -> list[Metric]:
        """What has been measured since the last call."""
        taken, self._metrics = self._metrics, []
        return taken

    @property
    def told(self) -> str | None:
        """What people should know of how it runs, if there is something."""
        return self._streamed.told() if self._streamed is not None else None

    @property
    def epoch(self) -> float:
        return self.progress.micro_batch / self._packs_per_epoch

    # ---- state -------------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """The job as of the last finished optimizer step; what has been computed of the open step is not part of it."""
        model, names = self._model, self._optimizer.names
        kept = self._contents(names)
        adapter = self._optimizer.adapter(kept)
        return Snapshot(
            progress=msgspec.structs.replace(self.progress),
            optimizer=kept | self._optimizer.steps(),
            save_adapter=lambda folder: lora.save(model, adapter, folder),
        )

    def _contents(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Copies on the CPU of the optimizer's tensors of these names."""
        tensors = self._optimizer.tensors()
        return {name: tensors[name].detach().to("cpu", copy=True) for name in names}

    def start_again(self) -> Moment | None:
        """Give up what has been computed of the open optimizer step or evaluation; it starts again. Answers when what
        is queued is over, None when nothing is."""
        over = self._streamed.window.stop() if self._streamed is not None else None
        self._queue.clear()
        with torch.inference_mode(False):  # whoever asks may be in it
            self._optimizer.clear()
            self._refill()
        return over

    def close(self) -> Moment | None:
        """Take the LoRA modules out of the shared model and free what the job holds. Answers when what is queued is
        over, None when nothing is."""
        self._queue.clear()
        self._model.unload()  # type: ignore[operator]
        return self._streamed.unload() if self._streamed is not None else None

    # ---- program -----------------------------------------------------------------------------------------------------

    def _refill(self) -> None:
        """Queue what comes next: an optimizer step's micro-batches one by one, an evaluation, or nothing (done)."""
        every = self.spec.evaluate_every
        step = self.progress.step
        last = step >= self.total_steps or self.stopped_early
        due = last or (every > 0 and step > 0 and step % every == 0)
        if self._eval_packs and due and self.progress.evaluated_at != step:
            self._queue_evaluation()
        elif not last:
            self._queue_step()

    def _queue_step(self) -> None:
        """One optimizer step: `accumulation` micro-batches (fewer at the end) and the update."""
        first = self.progress.micro_batch
        packs = self._packs[first : first + self.spec.accumulation]
        batches = [self._batch(pack) for pack in packs]
        denominator = max(1, sum(batch.targets.numel() for batch in batches))
        runs = [
            MicroBatchRun(
                self._base,
                batch,
                denominator=denominator,
                loss_chunk_tokens=self._chunk,
                train=True,
                dropout=DropoutSeed(self.spec.seed, first + n) if self.spec.lora.dropout > 0 else None,
                after_backward=self._collect,
                layer=self._layer,
            )
            for n, batch in enumerate(batches)
        ]
        self._model.train()
        self._begin(runs)
        tokens = sum(batch.tokens for batch in batches)
        self._queue.append(Tasklet("optimizer", lambda: self._update(runs, denominator, tokens)))
        self._queue_tokens = tokens / len(self._queue)

    def _queue_evaluation(self) -> None:
        """The held-out rows, forward only."""
        batches = [self._batch(pack) for pack in self._eval_packs]
        denominator = max(1, sum(batch.targets.numel() for batch in batches))
        runs = [
            MicroBatchRun(
                self._base,
                batch,
                denominator=denominator,
                loss_chunk_tokens=self._chunk,
                train=False,
                dropout=None,
                layer=self._layer,
            )
            for batch in batches
        ]
        self._model.eval()
        self._begin(runs)
        last = self._queue.pop()
        self._queue.append(Tasklet(last.kind, lambda: self._finish_evaluation(last, runs, denominator)))
        self._queue_tokens = 0.0

    def _begin(self, runs: Sequence[MicroBatchRun]) -> None:
        for run in runs:
            self._queue.extend(run.tasklets())
        if self._streamed is not None:
            self._streamed.window.follow([layer for run in runs for layer in run.layers])

    def _layer(self) -> AbstractContextManager[None]:
        return self._streamed.window.computing() if self._streamed is not None else nullcontext()

    def _batch(self, pack: Sequence[int]) -> PackedBatch:
        rows = [self._rows[i] for i in pack]
        return PackedBatch.of(packing.build(rows, self.spec.micro_batch_tokens), self._device)

    def _collect(self, layer: int) -> None:
        self._optimizer.collect(self._layer_parameters[layer])

    def _update(self, runs: list[MicroBatchRun], denominator: int, tokens: int) -> None:
        progress = self.progress
        loss = sum(run.loss() for run in runs) / denominator
        rate = self.spec.learning_rate * schedule.factor(
            self.spec.schedule, progress.step, self.total_steps, self._warmup
        )
        if not math.isfinite(loss):
            raise NotFinite(
                "loss_not_finite",
                f"the loss became {loss} at step {progress.step + 1}; lower learning_rate "
                f"({self.spec.learning_rate:g}) or look at the rows",
                "learning_rate",
            )
        norm = self._optimizer.step(rate)
        if not math.isfinite(norm):
            raise NotFinite(
                "gradient_not_finite",
                f"the gradient's norm became {norm} at step {progress.step + 1}; lower learning_rate "
                f"({self.spec.learning_rate:g})",
                "learning_rate",
            )
        progress.step += 1
        progress.micro_batch += len(runs)
        progress.tokens += tokens
        progress.first_loss = loss if progress.first_loss is None else progress.first_loss
        progress.last_loss = loss
        self._metrics.append(
            Metric(
                step=progress.step,
                epoch=self.epoch,
                tokens=progress.tokens,
                loss=loss,
                learning_rate=rate,
                grad_norm=norm,
            )
        )

    def _finish_evaluation(self, last: Tasklet, runs: list[MicroBatchRun], denominator: int) -> None:
        last.run()
        loss = sum(run.loss() for run in runs) / denominator
        evaluation.note(self.progress, self.progress.step, loss)
        self._metrics.append(
            Metric(step=self.progress.step, epoch=self.epoch, tokens=self.progress.tokens, eval_loss=loss)
        )


def _epoch(spec: JobSpec, rows: Sequence[Encoded], chosen: Sequence[int], epoch: int) -> list[list[int]]:
    """The rows of each micro-batch of one epoch over the `chosen` rows."""
    lengths = [len(rows[i].ids) for i in chosen]
    plan = packing.epoch_plan(lengths, spec.micro_batch_tokens, seed=spec.seed, epoch=epoch)
    return [[chosen[i] for i in pack] for pack in plan]


def _packs(spec: JobSpec, rows: Sequence[Encoded], chosen: Sequence[int]) -> list[list[int]]:
    """The rows of every micro-batch of the whole job, in order."""
    packs: list[list[int]] = []
    epoch = 0
    if spec.max_steps is not None:
        wanted = spec.max_steps * spec.accumulation
        while len(packs) < wanted:
            packs += _epoch(spec, rows, chosen, epoch)
            epoch += 1
        return packs[:wanted]
    epochs = spec.epochs if spec.epochs is not None else 1.0
    while epoch < epochs:
        plan = _epoch(spec, rows, chosen, epoch)
        packs += plan[: math.ceil(len(plan) * min(1.0, epochs - epoch))]
        epoch += 1
    return packs


def _head_chunk(model: PreTrainedModel, micro_batch_tokens: int) -> int:
    """Tokens per head tasklet, such that it multiplies about as much as one layer does for the whole micro-batch: the
    vocabulary's matrix is many layers large, and no tasklet should be much longer than the others."""
    layer: int = sum(p.numel() for p in model.model.layers[0].parameters())
    head: int = model.lm_head.weight.numel()
    return int(max(16, round(micro_batch_tokens * layer / head)))


def _by_layer(parameters: dict[str, torch.nn.Parameter], layers: int) -> list[list[str]]:
    return [[name for name in parameters if f".layers.{index}." in name] for index in range(layers)]


def _fingerprint(spec: JobSpec, rows: Sequence[Encoded]) -> str:
    """What must be the same for a checkpoint to fit: everything that shapes the sequence of updates."""
    relevant = {key: value for key, value in msgspec.to_builtins(spec).items() if key not in _UNRELATED}
    if spec.base_model is None:  # as it was before jobs had one
        del relevant["base_model"]
    digest = hashlib.sha256(msgspec.json.encode(relevant))
    for row in rows:
        digest.update(row.ids.tobytes())
    return digest.hexdigest()
