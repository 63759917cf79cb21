"""The finetune job that the engine holds: prepared and saved in a thread, paced by the scheduler's."""

from __future__ import annotations

import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch

from core.errors import HarliError, full_disk
from core.finetune import checkpoint, evaluation
from core.finetune.captured_job import CapturedJob
from core.finetune.trainer import Metric, Trainer
from core.intake import adapter
from core.link.messages import JobSpec, JobUpdate
from core.memory.moment import Moment
from core.policy.types import JobView, TaskletKind

logger = logging.getLogger(__name__)

# More tasklets than ever fit between two steps.
_LOOK_AHEAD = 64
# Preparing, packing ahead and writing checkpoints run Python beside decode for as long as there is a job; a short
# switch interval keeps decode's wait for the interpreter lock short.
_SWITCH_INTERVAL_S = 0.0005
# Copies of a job's state that wait for the disk; with more the job does.
_MOST_WAITING = 2
# Between two tries to write what the disk had no room for.
_TRY_AGAIN_S = 5.0

_ALIKE: Mapping[TaskletKind, float] = {}


class JobRun:
    """One job from `StartJob` to its last `JobUpdate`.

    All methods belong to the scheduler's thread and return quickly; `prepare` builds the `Trainer` in a thread of the
    run's own. A failure of any kind ends the job with a `failed` update and is never raised into the engine. What a
    full disk has no room for is none: it is written once there is room, and the job goes on as far as it can meanwhile.
    """

    def __init__(
        self,
        engine_id: str,
        spec: JobSpec,
        token: int,
        prepare: Callable[[], Trainer | CapturedJob],
        send: Callable[[JobUpdate], Any],
    ) -> None:
        self.spec = spec
        self.token = token
        self.ended = False
        self._engine_id = engine_id
        self._send = send
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="harli-job")
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self._preparing: Future[Trainer | CapturedJob] | None = self._pool.submit(prepare)
        self._trainer: Trainer | CapturedJob | None = None
        self._checkpointed_step = 0
        self._writing: list[tuple[Future[Path], Callable[[Path], None]]] = []
        self._no_room: str | None = None  # what could not be written, until it has been told
        self._leaving = threading.Event()  # nothing waits for room any more
        self._wish: Literal["pause", "save", "cancel"] | None = None
        self._closing = False

    # ---- what the policy sees ----------------------------------------------------------------------------------------

    def view(self) -> JobView | None:
        """The job for a policy; None while it has nothing to run (preparing, saving, ended) or waits for the disk."""
        if self._trainer is None or self._closing or len(self._writing) > _MOST_WAITING:
            return None
        try:
            tasklets = self._trainer.upcoming(_LOOK_AHEAD)
        except Exception as error:  # a copy of layers that are on their way
            self._fail(error)
            return None
        return JobView(
            job_id=self.spec.job_id,
            tasklets=tasklets,
            tenant=self.spec.tenant,
            priority=self.spec.priority,
            tokens_per_tasklet=self._trainer.tokens_per_tasklet,
        )

    def run_next(self) -> TaskletKind | None:
        """Run one tasklet and report what it measured; None when it failed and the job is over."""
        trainer = self._trainer
        assert isinstance(trainer, Trainer)
        try:
            kind = trainer.run_next()
        except Exception as error:
            self._fail(error)
            return None
        self._metrics()
        return self._went_on(kind)

    def on(self, partition: int) -> AbstractContextManager[None]:
        """What several captured tasklets are queued within on a partition's stream."""
        return self._trainer.on(partition) if isinstance(self._trainer, CapturedJob) else nullcontext()

    def launch(self, partition: int) -> TaskletKind | None:
        """Queue one captured tasklet on a partition's stream; None when there is none, or when it failed and the job is
        over. What it measures, `poll` reports."""
        trainer = self._trainer
        if self._closing or trainer is None or isinstance(trainer, Trainer):
            return None
        try:
            kind = trainer.launch(partition)
        except Exception as error:
            self._fail(error)
            return None
        if kind == "optimizer":
            self._metrics()
            return self._went_on(kind)
        return kind

    def _went_on(self, kind: TaskletKind) -> TaskletKind | None:
        """A tasklet came through: write a checkpoint behind it where one is due. None when what has been measured ended
        the job."""
        if self.ended:
            return None
        assert self._trainer is not None
        due = self._trainer.progress.step - self._checkpointed_step >= self.spec.checkpoint_every
        # One that the disk is not done with puts the next one off: each holds a copy of the job's state meanwhile.
        if kind == "optimizer" and due and not self._writing:
            self._checkpoint("checkpoint")
        return kind

    def _metrics(self) -> None:
        """Tell what has been measured; a measurement that is no number ends the job."""
        if self._trainer is None:
            return
        try:
            for metric in self._trainer.take_metrics():
                if metric.eval_loss is None:
                    self._report("metric", **metric._asdict())
                else:
                    self._evaluated(metric)
        except Exception as error:
            self._fail(error)

    def _evaluated(self, metric: Metric) -> None:
        """Tell of an evaluation, and keep the adapter that it was of, where the job wants that."""
        assert self._trainer is not None
        progress = self._trainer.progress
        self._report("metric", **metric._asdict(), best_step=progress.best_step, best_loss=progress.best_loss)
        if self.spec.sample or (self.spec.keep_best and progress.best_step == metric.step):
            snapshot = self._trainer.snapshot()
            folder = Path(self.spec.output_dir)

            def save(place: Path) -> None:
                snapshot.save_adapter(place)
                adapter.normalise(place)

            def write() -> Path:
                return checkpoint.write_evaluated(folder, snapshot.progress, save)

            def report(path: Path) -> None:
                self._report("evaluated", step=metric.step, path=str(path))

            self._write(f"the adapter evaluated after step {metric.step}", write, report)

    @property
    def relative(self) -> Mapping[TaskletKind, float]:
        """How many times as long as those of the engine's profile its tasklets take, by kind; what is not named takes
        as long."""
        return self._trainer.relative if isinstance(self._trainer, CapturedJob) else _ALIKE

    @property
    def tokens_per_tasklet(self) -> float:
        return self._trainer.tokens_per_tasklet if self._trainer is not None else 0.0

    # ---- orders ------------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Checkpoint, free everything, report `paused`."""
        self._wish = self._wish or "pause"

    def start_again(self) -> Moment | None:
        """Give up what has been computed of the open optimizer step, and with it the memory that it holds; answers when
        what is queued is over, None when nothing is."""
        return self._trainer.start_again() if self._trainer is not None else None

    def stop(self, save: bool) -> None:
        """End now: with the adapter as it stands, or with nothing."""
        self._wish = "save" if save else "cancel"

    def poll(self) -> None:
        """Take up what threads finished and what was ordered; to be called between steps."""
        if self.ended:
            return
        if self._preparing is not None and self._preparing.done():
            self._take_up(self._preparing)
        if self._no_room is not None:
            self._report("log", message=self._no_room)
            self._no_room = None
        while self._writing and self._writing[0][0].done():
            future, report = self._writing.pop(0)
            try:
                report(future.result())
            except Exception as error:
                self._not_written(error)
                return
        self._metrics()
        if self._trainer is not None and not self._closing:
            if self._wish is not None:
                self._obey(self._wish)
            elif self._trainer.done:
                if self._trainer.stopped_early:
                    progress = self._trainer.progress
                    self._report("stopped_early", step=progress.step, message=evaluation.why_stopped(progress))
                self._save("succeeded")

    def interrupt(self) -> None:
        """The engine stops: checkpoint now, report `interrupted`, wait until it is written. Where the disk has no room,
        the checkpoint before has to do."""
        if self.ended:
            return
        self._leaving.set()
        if self._closing:  # already on its way out: let it finish
            self._drain()
        elif self._trainer is not None:
            self._closing = True
            self._checkpoint("interrupted")
            self._drain()
        else:
            self._report("interrupted")
            self._end()

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _take_up(self, preparing: Future[Trainer | CapturedJob]) -> None:
        self._preparing = None
        try:
            self._trainer = preparing.result()
        except Exception as error:
            self._fail(error)
            return
        self._checkpointed_step = self._trainer.progress.step
        trainer = self._trainer
        self._report("started", total_steps=trainer.total_steps, step=trainer.progress.step, message=trainer.told)

    def _obey(self, wish: Literal["pause", "save", "cancel"]) -> None:
        if wish == "pause":
            self._closing = True
            self._checkpoint("paused")
        elif wish == "save":
            self._save("succeeded")
        else:
            self._report("cancelled")
            self._end()

    def _checkpoint(self, kind: Literal["checkpoint", "paused", "interrupted"]) -> None:
        assert self._trainer is not None
        snapshot = self._trainer.snapshot()
        step = self._checkpointed_step = snapshot.progress.step

        def report(path: Path) -> None:
            self._report(kind, step=step, path=str(path))
            if kind != "checkpoint":
                self._end()

        self._write(f"the checkpoint of step {step}", lambda: snapshot.write(Path(self.spec.output_dir)), report)

    def _save(self, kind: Literal["succeeded"]) -> None:
        assert self._trainer is not None
        self._closing = True
        self._report("saving", step=self._trainer.progress.step)
        snapshot = self._trainer.snapshot()

        progress = snapshot.progress
        output = Path(self.spec.output_dir)
        best = progress.best_step if self.spec.keep_best else None
        message = None
        if best is not None:
            message = f"that of step {best}, whose evaluation loss was the lowest ({progress.best_loss:.4f})"

        def write() -> Path:
            folder = output / "adapter"
            shutil.rmtree(folder, ignore_errors=True)
            if best is not None:
                shutil.copytree(checkpoint.evaluated(output, best), folder)
            else:
                snapshot.save_adapter(folder)
                adapter.normalise(folder)
            return folder

        def report(path: Path) -> None:
            self._report(kind, step=progress.step, path=str(path), tokens=progress.tokens, message=message)
            self._end()

        self._write("the adapter", write, report)

    def _write(self, what: str, write: Callable[[], Path], report: Callable[[Path], None]) -> None:
        """Have the run's thread write, and `poll` report where that is."""
        self._writing.append((self._pool.submit(self._written, what, write), report))

    def _written(self, what: str, write: Callable[[], Path]) -> Path:
        told = False
        while True:
            try:
                return write()
            except Exception as error:
                if full_disk(error) is None or self._leaving.is_set():
                    raise
                if not told:
                    logger.warning("job %s: no room on the disk for %s: %s", self.spec.job_id, what, error)
                    self._no_room = (
                        f"the disk of the data directory is full: {what} is not written yet, and tried again every "
                        f"{_TRY_AGAIN_S:g} s; free some of it"
                    )
                    told = True
            self._leaving.wait(_TRY_AGAIN_S)

    def _not_written(self, error: Exception) -> None:
        if self._leaving.is_set() and full_disk(error) is not None:
            self._report("interrupted")
            self._end()
        else:
            self._fail(error)

    def _drain(self) -> None:
        while not self.ended and self._writing:
            self._writing[0][0].exception()  # waits; the outcome is taken up by poll
            self.poll()

    def _fail(self, error: Exception) -> None:
        if isinstance(error, HarliError):
            code, message, param = error.code, error.message, error.param
        elif isinstance(error, torch.OutOfMemoryError):
            code, param = "out_of_memory", "micro_batch_tokens"
            message = f"the device has no memory left for this job ({error}); lower micro_batch_tokens or the rank"
        else:
            code, message, param = "internal", f"{type(error).__name__}: {error}", None
        logger.error("job %s failed: %s", self.spec.job_id, message, exc_info=error)
        self._report("failed", code=code, message=message, param=param)
        self._end()

    def _end(self) -> None:
        self.ended = True
        self._leaving.set()
        sys.setswitchinterval(self._interval)
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None
        self._pool.shutdown(wait=False)

    def _report(self, kind: Any, **fields: Any) -> None:
        self._send(
            JobUpdate(
                engine_id=self._engine_id,
                job_id=self.spec.job_id,
                token=self.token,
                time=time.time(),
                kind=kind,
                **fields,
            )
        )
