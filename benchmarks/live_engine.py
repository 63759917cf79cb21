"""One engine for benchmarks/live.py: ``python -m benchmarks.live_engine {harli,plain} MODEL FILE``

Both are started with the arguments that Harli gives SGLang (settings from the environment), and in both the scheduler
notes in FILE when each batch's result was through. Answers that are asked for whole are sent when they end (see
`benchmarks.frontier`). SIGUSR1 has either process write where its threads are to the log.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.frontier import WHOLE_ANSWER

if not torch.cuda.is_available():  # read while SGLang is imported, here and in the processes that it spawns
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCH_COMPILE_DISABLE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
os.environ |= {
    "HF_HUB_OFFLINE": "1", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    "SGLANG_FORCE_STREAM_INTERVAL": str(WHOLE_ANSWER),
}  # fmt: skip

from benchmarks.moments import Moments
from core.serving import processes

MOMENTS = "HARLI_BENCHMARK_MOMENTS"
_scheduler = processes.run_scheduler


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """SGLang's scheduler process, which notes its results; adapters are read from their files also where the model's
    weights are made up (load_format dummy)."""
    from safetensors.torch import load_file
    from sglang.srt.lora.lora import LoRAAdapter
    from sglang.srt.managers.scheduler import Scheduler

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    moments, process = Moments(Path(os.environ[MOMENTS])), Scheduler.process_batch_result

    def noted(self: Any, batch: Any, *more: Any, **named: Any) -> Any:
        answer = process(self, batch, *more, **named)
        moments.add(len(batch.reqs) if batch.forward_mode.is_decode() else 0)
        return answer

    def read(self: Any) -> None:
        self.initialize_weights_from_tensors(load_file(Path(self.config.path) / "adapter_model.safetensors"))

    Scheduler.process_batch_result = noted
    LoRAAdapter.initialize_weights = read
    _scheduler(*args, **kwargs)


def main(kind: str, model: Path) -> None:
    """Serve until SIGTERM."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    from core.config import Settings
    from core.serving import launch

    settings = Settings()
    processes.run_scheduler = run_scheduler
    if kind == "harli":
        launch.serve(settings, model, say=lambda text: print(text, flush=True))
        return
    from sglang.srt.entrypoints.http_server import launch_server

    launch_server(
        launch.server_arguments(settings, model, launch.resolve_device(settings.engine.device)),
        run_scheduler_process_func=run_scheduler,
        run_detokenizer_process_func=processes.run_detokenizer,
    )


if __name__ == "__main__":
    os.environ[MOMENTS] = sys.argv[3]
    main(sys.argv[1], Path(sys.argv[2]))
