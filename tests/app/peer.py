"""The engine's side of the link without an engine: it reports figures, and "runs" jobs whose loss falls on paper.

For tests of what the console shows and does; what an engine really does is tested with one.
"""

from __future__ import annotations

import math
import queue
import threading
import time
import uuid
from pathlib import Path

from core.link.messages import (
    FromEngine,
    Hello,
    JobUpdate,
    MemoryOwner,
    MemoryView,
    PauseJob,
    PlanView,
    SetTargets,
    StartJob,
    StopJob,
    Telemetry,
    ToEngine,
)
from core.link.transport import EngineEnd

SOLO_ITL_MS = 20.0
STEPS = 400
_REPORT_S = 0.5
_STEP_S = 0.1


class Peer:
    """A thread that owns the engine's end of the link at `url`, for a served model in `model`."""

    def __init__(self, url: str, model: Path, http_url: str) -> None:
        self._url = url
        self._model = model
        self._http_url = http_url
        self._id = f"peer-{uuid.uuid4().hex[:8]}"
        self._targets_version = 0
        self._job: StartJob | None = None
        self._step = 0
        self._said: queue.SimpleQueue[FromEngine] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peer", daemon=True)

    @property
    def engine_id(self) -> str:
        return self._id

    def say(self, message: FromEngine) -> None:
        """Have this sent by the thread that owns the link."""
        self._said.put(message)

    def __enter__(self) -> Peer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(5)

    def _run(self) -> None:
        end = EngineEnd(self._url, self._id)
        next_report = next_step = time.monotonic()
        try:
            while not self._ended.is_set():
                if end.reconnected():
                    end.send(self._hello())
                message = end.receive(20)
                if message is not None:
                    self._obey(end, message)
                while not self._said.empty():
                    self._send(end, self._said.get())
                if time.monotonic() >= next_report:
                    next_report = time.monotonic() + _REPORT_S
                    end.send(self._telemetry())
                if self._job is not None and time.monotonic() >= next_step:
                    next_step = time.monotonic() + _STEP_S
                    self._train(end)
        finally:
            end.close()

    def _hello(self) -> Hello:
        return Hello(
            engine_id=self._id,
            pid=1,
            http_url=self._http_url,
            model=self._model.name,
            model_path=str(self._model),
            device="cpu",
            device_name="a CPU",
            dtype="float32",
            parameters=134_515_008,
            versions={},
            max_lora_rank=16,
            lora_modules=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
            kv_tokens=8192,
            max_running_requests=8,
            partitions=("whole",),
            solo_itl_ms=SOLO_ITL_MS,
        )

    def _obey(self, end: EngineEnd, message: ToEngine) -> None:
        match message:
            case SetTargets(version=version):
                self._targets_version = version
            case StartJob():
                self._job, self._step = message, 0
                self._report(end, "started", total_steps=message.spec.max_steps or STEPS)
                self._report(end, "log", message="the job began")
            case PauseJob() if self._job is not None:
                self._report(end, "paused")
                self._job = None
            case StopJob() if self._job is not None:
                self._report(end, "cancelled")
                self._job = None

    def _train(self, end: EngineEnd) -> None:
        assert self._job is not None
        self._step += 1
        spec = self._job.spec
        loss = 1 + 2 * math.exp(-self._step / 120)
        evaluated = spec.evaluate_every > 0 and self._step % spec.evaluate_every == 0
        self._report(
            end,
            "metric",
            epoch=self._step / 100,
            loss=loss,
            eval_loss=loss + 0.1 if evaluated else None,
            learning_rate=spec.learning_rate,
            grad_norm=0.5,
            tokens=self._step * spec.micro_batch_tokens,
        )

    def _report(self, end: EngineEnd, kind: str, **fields: object) -> None:
        assert self._job is not None
        spec, token = self._job.spec, self._job.token
        update = JobUpdate(
            engine_id=self._id, job_id=spec.job_id, token=token, time=time.time(), kind=kind, step=self._step, **fields
        )  # type: ignore[arg-type]
        self._send(end, update)

    @staticmethod
    def _send(end: EngineEnd, message: FromEngine) -> None:
        assert end.send(message), "the link's queue is full"

    def _telemetry(self) -> Telemetry:
        wave = math.sin(time.time() / 7)
        gap = SOLO_ITL_MS * (1.5 + 0.3 * wave)
        training = self._job is not None
        return Telemetry(
            engine_id=self._id,
            time=time.time(),
            interval_s=_REPORT_S,
            itl=[(gap, 9), (gap * 1.3, 1)],
            stalls=[(gap * 5, 2)],
            ttft_ms=[90 + 20 * wave],
            tpot_ms=[gap],
            decode_steps=10,
            decode_tokens=30,
            finetune_tokens=100 if training else 0,
            running=3,
            waiting=1,
            kv_used=int(2000 + 800 * wave),
            kv_total=8192,
            busy_share=0.9 if training else 0.5,
            decode_share=0.5,
            finetune_share=0.4 if training else 0.0,
            memory_bytes=2**30,
            memory=_memory(training),
            targets_version=self._targets_version,
            plan=PlanView(
                policy="tasklet_slices",
                after=3.5 if training else 0.0,
                reason="3 tasklets fit under the target" if training else "no job",
            ),
        )


def _memory(training: bool) -> MemoryView:
    """An arena of 640 MiB, a quarter of it with the job while one runs."""
    page, quarter = 2**18, 160 * 2**20
    job = quarter if training else 0
    return MemoryView(
        page_bytes=page,
        capacity_bytes=4 * quarter,
        used_bytes=4 * quarter,
        high_water_bytes=4 * quarter,
        kept_bytes=0,
        kv_tokens=6144 if training else 8192,
        kv_most_tokens=8192,
        owners=(MemoryOwner("kv cache", 4 * quarter - job, 4 * quarter), MemoryOwner("job 1", job, quarter)),
        reclaims=3 if training else 0,
        reclaim_ms=31.4 if training else None,
    )
