"""A finetuning job on captured tasklets: the life cycle of `core.finetune.trainer.Trainer`, launched instead of run.

Launching is ahead of the device: `progress` counts what was launched, metrics come when the device has got there, and a
snapshot is a copy in stream order, so a checkpoint holds exactly the steps that its progress names.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from core.errors import Invalid
from core.finetune import checkpoint, evaluation, lora, schedule
from core.finetune.captured import CapturedTrainer, JobState, Program
from core.finetune.checkpoint import Progress
from core.finetune.trainer import Metric, NotFinite, _epoch, _fingerprint, _packs
from core.intake import packing
from core.intake.chat import Encoded
from core.link.messages import JobSpec
from core.memory.share import JobShare
from core.policy.types import TaskletKind

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


class CapturedSnapshot:
    """A consistent copy of a job between two optimizer steps; `write` and `save_adapter` wait for it, in any thread."""

    def __init__(self, progress: Progress, state: JobState, model: PeftModel, like: dict[str, torch.Tensor]) -> None:
        self.progress = progress
        self._state, self._model, self._like = state, model, like

    def save_adapter(self, folder: Path) -> None:
        """Write the adapter as peft does."""
        lora.save(self._model, self._state.adapter(self._like), folder)

    def write(self, output_dir: Path) -> Path:
        """Write it as a checkpoint under `output_dir` and return the checkpoint's folder."""
        folder = output_dir / "checkpoints"
        path = checkpoint.write(folder, self.progress, self._state.optimizer(self._like), self.save_adapter)
        checkpoint.prune(folder, keep=2)
        return path


class CapturedJob:
    """`spec` trained on `rows` in the slot `compute`, over `model` (frozen, as `views.shared_model` gives it, or the
    model of the slot's streamed base, loaded; that is unloaded when the job is closed).

    new_share: makes the share of the slot's part of the arena, where it has one; nothing is launched before that is
    ready. Raises `Invalid` for dropout, a rank that the slot does not hold, another micro-batch size, rows that no
    micro-batch holds, an empty data set and a checkpoint of another job.
    """

    def __init__(
        self,
        compute: CapturedTrainer,
        model: PreTrainedModel,
        spec: JobSpec,
        rows: Sequence[Encoded],
        *,
        base_name: str,
        resume_from: Path | None = None,
        new_share: Callable[[], JobShare] | None = None,
    ) -> None:
        slot = compute.slot
        if spec.lora.dropout > 0 or spec.lora.rank > slot.rank or spec.micro_batch_tokens != slot.micro_batch_tokens:
            raise Invalid(
                "no_slot",
                f"captured tasklets of rank {slot.rank} and micro-batches of {slot.micro_batch_tokens} tokens, without "
                f"dropout, cannot run a job of rank {spec.lora.rank}, {spec.micro_batch_tokens} tokens and dropout "
                f"{spec.lora.dropout:g}; change the job, or start the engine with such a slot",
                "lora",
            )
        train, evaluation = packing.split(len(rows), spec.evaluation_fraction, spec.seed)
        if len(train) == 0:
            raise Invalid("empty_dataset", "the data set has no row to train on; add rows", "dataset")
        self.spec = spec
        self._compute, self._rows = compute, rows
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
        self._partition = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="harli-pack")
        self._ahead: Future[Program] | None = None
        self._metrics: list[Metric] = []
        self._expected: deque[Metric] = deque()
        self._kinds: deque[TaskletKind] = deque()
        self._tokens_per_tasklet = 0.0
        self._launched = 0
        self._evaluated_at = self.progress.evaluated_at  # what was launched; `progress` has what is known
        self._evaluating = False
        self._kept: JobState | None = None  # the last snapshot of state that was away, until it is read
        self._model = lora.wrap(model, spec.lora, seed=spec.seed, base_name=base_name, initial=initial)
        self._parameters = {name: p.detach() for name, p in lora.trainable(self._model).items()}
        rank = spec.lora.rank
        self._share: JobShare | None = None
        try:
            self._share = new_share() if new_share is not None else None  # from here on the slot is this job's
            compute.load_job(
                self._parameters,
                scaling=spec.lora.alpha / (math.sqrt(rank) if spec.lora.use_rslora else rank),
                weight_decay=spec.weight_decay,
                max_grad_norm=spec.max_grad_norm,
                state=state,
            )
            self._refill()
        except Exception:
            self.close()
            raise

    # ---- pacing ------------------------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """All steps and the last evaluation are through, on the device too."""
        return not self._kinds and not self._expected

    @property
    def relative(self) -> Mapping[TaskletKind, float]:
        """See `CapturedTrainer`."""
        return self._compute.relative

    @property
    def stopped_early(self) -> bool:
        """Evaluations brought no improvement for as long as the job has patience."""
        return evaluation.exhausted(self.progress, self.spec)

    def upcoming(self, count: int) -> tuple[TaskletKind, ...]:
        """The kinds of the next tasklets, at most `count`: those of the open step, and of the one that `launch` goes on
        with once it has been packed. There are none while the device has yet to come to the end of an evaluation that
        decides something or a snapshot has yet to be read, and of a streamed base only those whose layers are on the
        device."""
        if self._unread:
            return ()
        kinds = tuple(islice(self._kinds, count))
        if kinds and len(kinds) < count and self._goes_on and self._ahead is not None and self._ahead.done():
            kinds += self._ahead.result().kinds[: count - len(kinds)]
        return kinds[: self._compute.there(kinds)] if self._ready else kinds

    @property
    def tokens_per_tasklet(self) -> float:
        """Tokens (without padding) of the open step, shared out over its tasklets."""
        return self._tokens_per_tasklet

    def on(self, partition: int) -> AbstractContextManager[None]:
        """See `CapturedTrainer`."""
        return self._compute.on(partition)

    def launch(self, partition: int) -> TaskletKind | None:
        """Launch the next tasklet on the partition's stream, behind the one before it, whose order the caller sees to;
        None when there is none left, or none that may be launched yet."""
        if not self._kinds or self._unread or not self._ready or not self._compute.there((self._kinds[0],)):
            return None
        kind = self._kinds.popleft()
        self._compute.launch(partition, self._launched)
        self._launched += 1
        self._partition = partition
        if not self._kinds:
            self._finish()
            if not (self._evaluating and evaluation.decides(self.spec)):
                self._refill()
        return kind

    @property
    def _ready(self) -> bool:
        return self._share is None or self._share.ready

    @property
    def _unread(self) -> bool:
        """Somebody has yet to read state that was away, which is back perhaps, and would change with the next step."""
        if self._kept is not None and self._kept.read:
            self._kept = None
        return self._kept is not None

    def start_again(self) -> torch.cuda.Event:
        """Give up what has been launched of the open optimizer step or evaluation; it starts again when its buffers
        have been mapped anew. Answers when everything that was launched is through."""
        if self._kinds:
            self._kinds = deque(self._loaded.kinds)
            self._launched = 0
        return self._compute.leave_off(self._partition)

    def take_metrics(self) -> list[Metric]:
        """What the device has measured since the last call. Raises `NotFinite`; the job is then to be closed."""
        if self._share is not None:
            self._share.check()
        for result in self._compute.results():
            metric = self._expected.popleft()
            if metric.learning_rate is None:
                self._metrics.append(metric._replace(eval_loss=result.loss))
                evaluation.note(self.progress, metric.step, result.loss)
                if evaluation.decides(self.spec):
                    self._refill()
                continue
            for name, value in (("loss", result.loss), ("gradient", result.grad_norm or 0.0)):
                if not math.isfinite(value):
                    raise NotFinite(
                        f"{name}_not_finite",
                        f"the {name} became {value} at step {metric.step}; lower learning_rate "
                        f"({self.spec.learning_rate:g}) or look at the rows",
                        "learning_rate",
                    )
            progress = self.progress
            progress.first_loss = result.loss if progress.first_loss is None else progress.first_loss
            progress.last_loss = result.loss
            self._metrics.append(metric._replace(loss=result.loss, grad_norm=result.grad_norm))
        taken, self._metrics = self._metrics, []
        return taken

    @property
    def told(self) -> str | None:
        """What people should know of how it runs, if there is something."""
        return self._compute.streamed.told() if self._compute.streamed is not None else None

    @property
    def epoch(self) -> float:
        return self.progress.micro_batch / self._packs_per_epoch

    # ---- state -------------------------------------------------------------------------------------------------------

    def snapshot(self) -> CapturedSnapshot:
        """The job as of the last optimizer step that was launched; the open step is not part of it."""
        away = not self._ready
        state = self._compute.job_state(self._partition, away=away)
        if away:
            self._kept = state
        return CapturedSnapshot(msgspec.structs.replace(self.progress), state, self._model, self._parameters)

    def close(self) -> None:
        """Take the LoRA modules out of the shared model; the slot is free for the next job when its memory is back."""
        self._kinds.clear()
        self._expected.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._leave()

    def _leave(self) -> None:
        self._model.unload()  # type: ignore[operator]
        over = self._compute.leave_off(self._partition)
        if self._compute.streamed is not None:
            self._compute.streamed.unload()
        if self._share is not None:
            self._share.close(over)

    # ---- program -----------------------------------------------------------------------------------------------------

    def _evaluates_after(self, step: int) -> bool:
        """So many optimizer steps are followed by an evaluation."""
        every = self.spec.evaluate_every
        due = step >= self.total_steps or self.stopped_early or (every > 0 and step > 0 and step % every == 0)
        return bool(self._eval_packs) and due and self._evaluated_at != step

    @property
    def _goes_on(self) -> bool:
        """The open program is an optimizer step, and another follows it."""
        after = self.progress.step + 1
        return not self._evaluating and after < self.total_steps and not self._evaluates_after(after)

    def _refill(self) -> None:
        """Load what comes next: an optimizer step, an evaluation, or nothing; and have the step behind it packed."""
        step = self.progress.step
        last = step >= self.total_steps or self.stopped_early
        self._evaluating = self._evaluates_after(step)
        if self._evaluating:
            program = self._compute.program([self._build(pack) for pack in self._eval_packs], None)
        elif last:
            return
        else:
            program = self._ahead.result() if self._ahead is not None else self._step(step)
            self._ahead = self._pool.submit(self._step, step + 1) if step + 1 < self.total_steps else None
        self._launched = 0
        self._kinds.extend(self._compute.load(program))
        self._loaded = program
        self._tokens_per_tasklet = program.tokens / len(self._kinds) if program.trains else 0.0

    def _step(self, step: int) -> Program:
        """The program of optimizer step `step`; runs in a thread of its own, ahead of need."""
        first = step * self.spec.accumulation
        packs = self._packs[first : first + self.spec.accumulation]
        return self._compute.program([self._build(pack) for pack in packs], self._rate(step))

    def _build(self, pack: Sequence[int]) -> packing.MicroBatch:
        return packing.build([self._rows[i] for i in pack], self.spec.micro_batch_tokens)

    def _rate(self, step: int) -> float:
        return self.spec.learning_rate * schedule.factor(self.spec.schedule, step, self.total_steps, self._warmup)

    def _finish(self) -> None:
        """The program's last tasklet was launched: count it, and expect its result."""
        progress = self.progress
        rate = None
        if self._evaluating:
            self._evaluated_at = progress.step
        else:
            rate = self._rate(progress.step)
            progress.step += 1
            progress.micro_batch += self._loaded.micro_batches
            progress.tokens += self._loaded.tokens
        self._expected.append(Metric(step=progress.step, epoch=self.epoch, tokens=progress.tokens, learning_rate=rate))
