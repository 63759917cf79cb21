"""Start SGLang with the runtime inside, on a GPU or a CPU.

The process that calls `serve` becomes SGLang's HTTP server (OpenAI-compatible, on the engine's port); scheduler and
detokenizer are its children. When it is up, `serve` checks that the plugin took hold, measures the solo step time with
a few requests of its own, and only then is the engine announced to the control plane.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil

from core.config import EngineSettings, Settings
from core.errors import Invalid
from core.serving import activation
from core.serving.plugin import ENGINE_ID
from core.serving.versions import require_sglang

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EXIT_NOT_ACTIVE = 3
_STOP_TIMEOUT_S = 25.0
_CALIBRATION_BATCH = 4
_CALIBRATION_TOKENS = 26
_NO_PEER = "2.2.2.2"  # SGLang's FAKE_BOOTSTRAP_HOST
_PROFILE_S = 45.0  # no batch begins later, so that all of it takes less than a minute


def serve(settings: Settings, model_path: Path, say: Callable[[str], None] = print) -> None:
    """Serve `model_path` until SIGTERM. Raises `Unavailable`/`Invalid` before anything starts when that cannot work."""
    require_sglang()
    # What is imported and loaded stays, and to look for what does not takes a quarter of the time that it takes.
    gc.disable()
    device = device_and_threads(settings.engine)
    os.environ[ENGINE_ID] = f"engine-{uuid.uuid4().hex[:8]}"
    _environment(device)
    # Behind the environment: both read it while they are imported.
    from core.serving import processes  # isort: split
    from sglang.srt.entrypoints.http_server import launch_server

    launch_server(
        server_arguments(settings, model_path, device),
        run_scheduler_process_func=processes.run_scheduler,
        run_detokenizer_process_func=processes.run_detokenizer,
        launch_callback=lambda: _when_up(settings, say),
    )


def device_and_threads(engine: EngineSettings) -> str:
    """The device. How torch's threads wait for each other is read when torch is imported, before the device is known,
    and is inherited by what is forked: on a CPU spinning would starve the other processes of a small host."""
    if engine.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(engine.threads)
    given = os.environ.get("OMP_WAIT_POLICY")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    device = resolve_device(engine.device)
    if device == "cuda" and given is None:
        del os.environ["OMP_WAIT_POLICY"]  # for the scheduler, which is spawned
    return device


def resolve_device(wanted: str) -> str:
    """``cuda`` or ``cpu``; raises `Invalid` when a GPU is asked for and torch sees none."""
    import torch

    available = torch.cuda.is_available()
    if wanted == "auto":
        return "cuda" if available else "cpu"
    if wanted == "cuda" and not available:
        raise Invalid(
            "no_gpu",
            f"engine.device is cuda, but torch {torch.__version__} sees no GPU; install requirements/cuda.lock and the "
            "NVIDIA driver, or set HARLI_ENGINE__DEVICE=cpu",
            "engine.device",
        )
    return wanted


def server_arguments(settings: Settings, model_path: Path, device: str) -> ServerArgs:
    """SGLang's arguments for the device."""
    from sglang.srt.server_args import ServerArgs

    engine = settings.engine
    cpu = device == "cpu"
    arguments: dict[str, Any] = {
        "model_path": str(model_path),
        "served_model_name": model_path.name,
        "host": settings.host,
        "port": settings.engine_port,
        "device": device,
        "dtype": engine.dtype if engine.dtype != "auto" else ("float32" if cpu else "bfloat16"),
        "max_running_requests": engine.max_running_requests,
        "max_total_tokens": engine.max_total_tokens or (16_384 if cpu else None),
        "mem_fraction_static": engine.mem_fraction_static or (0.15 if cpu else None),
        "enable_lora": True,
        "max_lora_rank": engine.max_lora_rank,
        "max_loras_per_batch": engine.max_loras_per_batch,
        "lora_target_modules": list(LORA_MODULES),
        "sleep_on_idle": True,
        "log_level": "warning",
        # Eager tasklets run between a step's result and the next launch; with the overlap scheduler the next step would
        # already be on the device. Captured ones are queued behind the launch.
        "disable_overlap_schedule": cpu or not engine.captured,
    }
    if engine.attention_backend:
        arguments["attention_backend"] = engine.attention_backend
    if cpu:
        arguments |= {
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "disable_cuda_graph": True,
            "lora_backend": "torch_native",
            # A prefill stalls every stream for its whole length, and a CPU takes about a millisecond a token.
            "chunked_prefill_size": 256,
        }
    given = {name: value for name, value in arguments.items() if value is not None}
    return ServerArgs(**(given | engine.arguments))


def stop_engine(manager: Any) -> None:
    """End SGLang in order: the scheduler first (its runtime checkpoints), then everything else. Does not return to the
    event loop's caller: the process exits from a thread."""

    def stop() -> None:
        from sglang.srt.utils.cudacore_pyspy_dump_utils import collect_scheduler_processes

        if manager._subprocess_watchdog is not None:
            manager._subprocess_watchdog.stop()
        schedulers = collect_scheduler_processes()
        for process in schedulers:
            process.send_signal(signal.SIGTERM)
        psutil.wait_procs(schedulers, timeout=_STOP_TIMEOUT_S)
        for child in psutil.Process().children(recursive=True):
            child.kill()
        os._exit(0)

    # SGLang's own flag for this (gracefully_exit) stays unset: behind it a watchdog drains and then kills this process.
    threading.Thread(target=stop, name="harli-stop").start()


def _environment(device: str) -> None:
    """What SGLang and torch read from the environment; children inherit it."""
    os.environ["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"  # health checks must not cost decode a prefill each
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # When a part of it dies, SGLang first looks for what can be dumped, for 65 s in which requests hang and the engine
    # seems ready.
    for dump in ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH"):
        os.environ.setdefault(dump, "0")
    if wanted := os.environ.get("SGLANG_PLUGINS"):
        os.environ["SGLANG_PLUGINS"] = f"{wanted},harli"
    if device == "cpu":
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        os.environ["TORCH_COMPILE_DISABLE"] = "1"


def _when_up(settings: Settings, say: Callable[[str], None]) -> None:
    """SGLang answers: make sure that the runtime is inside, then let it measure the solo step."""
    engine_id = os.environ[ENGINE_ID]
    active = activation.take(settings.data_dir, engine_id)
    if active is None:
        say(
            "error: SGLang runs without Harli's runtime: its plugin 'harli' (entry point sglang.srt.plugins) is not "
            "installed or failed, see the log above; install the project with `pip install -e .` [runtime_not_active]"
        )
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
        return
    hello = active.hello
    _unname_load_file()
    say(f"engine {engine_id}: {hello.model} ({hello.dtype}) on {hello.device_name} at {settings.engine_url}")
    with httpx.Client(base_url=settings.engine_url, timeout=120.0) as http:
        decode_only = settings.engine.arguments.get("disaggregation_mode") == "decode"
        measure(http, active, say, decode_only=decode_only)
    say("ready")


def _unname_load_file() -> None:
    """SGLang shares the scheduler's load in a file of /dev/shm that it never removes. Once all who use it have it open
    its name can go: the kernel frees it with their last, however they end. Of several schedulers or HTTP processes it
    cannot be seen whether all have."""
    from sglang.srt.entrypoints.http_server import get_global_state
    from sglang.srt.managers.load_snapshot import ShmLoadSnapshotReader

    manager = get_global_state().tokenizer_manager
    reader, arguments = manager.load_snapshot_reader, manager.server_args
    alone = arguments.dp_size == 1 and arguments.tokenizer_worker_num == 1
    if alone and isinstance(reader, ShmLoadSnapshotReader) and reader.read_all():
        Path(reader.path).unlink(missing_ok=True)


def measure(
    http: httpx.Client, active: activation.Active, say: Callable[[str], None], *, decode_only: bool = False
) -> None:
    """Have the solo step measured, and what the runtime wants to know of this machine; then decode may be disturbed by
    nothing but requests. Raises httpx.HTTPStatusError where SGLang has no way to leave its objects alone."""
    rids = [f"{activation.CALIBRATION_PREFIX}{n}" for n in range(_CALIBRATION_BATCH)]
    http.post("/generate", json=_generate(rids, _CALIBRATION_TOKENS, decode_only=decode_only))
    profile(http, active, say, decode_only=decode_only)
    # What model, graphs and libraries are made of stays. Without this Python's collector looks at all of it now and
    # then, and no step runs meanwhile, for as long as many steps take.
    http.post("/freeze_gc").raise_for_status()
    gc.enable()
    # Two tokens: of a decode-only engine's requests the first comes from elsewhere.
    http.post("/generate", json=_generate([activation.CALIBRATION_END], 2, decode_only=decode_only))


def profile(
    http: httpx.Client, active: activation.Active, say: Callable[[str], None], *, decode_only: bool = False
) -> None:
    """Send the batches that the runtime wants to measure, as many as there is time for."""
    began = time.monotonic()
    for number, (requests, context) in enumerate(active.batches):
        if time.monotonic() - began > _PROFILE_S:
            say(f"profile: {number} of {len(active.batches)} batches measured in {_PROFILE_S:.0f} s; they have to do")
            return
        say(f"{number / len(active.batches):.2f}\tmeasures this GPU, once: {requests} requests of {context} tokens")
        rids = [activation.profile_rid(number, request) for request in range(requests)]
        http.post("/generate", json=_generate(rids, active.profile_steps, context, decode_only=decode_only))


def _generate(rids: list[str], tokens: int, context: int = 16, *, decode_only: bool = False) -> dict[str, Any]:
    """A request of SGLang's native API: distinct prompts, so that the prefix cache does not join them; the longer ones
    begin as the shorter ones do, so that it saves their prefill. decode_only: no peer prefills them; SGLang takes the
    KV of such a request, from a host of that name, as being there."""
    body: dict[str, Any] = {
        "rid": rids,
        "input_ids": [[100 + (7 * n + k) % 1021 for k in range(context)] for n, _ in enumerate(rids)],
        "sampling_params": {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True},
    }
    if decode_only:
        body |= {"bootstrap_host": [_NO_PEER] * len(rids), "bootstrap_room": list(range(len(rids)))}
    return body
