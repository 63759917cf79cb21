"""SGLang as anybody would start it: no Harli settings, no hook of Harli's, only the CPU stand-in. Its processes are
forked, to start in half the time. ``python -m … MODEL PORT``"""

from __future__ import annotations

import os
import sys

os.environ |= {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
}

from pathlib import Path

from core.config import Settings
from core.serving import processes  # puts the stand-in in place, ahead of sglang
from core.serving.launch import server_arguments


def main(model: Path, port: int) -> None:
    """Serve with the arguments that Harli uses, so that only the plugin makes the difference."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    load_plugins()
    print("hooks-of-harli:", len(HookRegistry._hooks), flush=True)
    spawn = Engine._launch_scheduler_processes.__func__
    Engine._launch_scheduler_processes = classmethod(lambda engine, *args: processes.fork(spawn, engine, *args))
    launch_server(
        server_arguments(Settings(engine_port=port), model, "cpu"),
        run_scheduler_process_func=processes.run_scheduler,
        run_detokenizer_process_func=processes.run_detokenizer,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
