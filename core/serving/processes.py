"""Entry points of SGLang's child processes.

SGLang spawns its scheduler and detokenizer; a spawned child imports the module of its entry point before anything else,
so importing this module is what puts the CPU stand-in in place there, ahead of SGLang.
"""

from __future__ import annotations

import os
from typing import Any

if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    from core.serving import cpu_standin

    cpu_standin.install()


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """SGLang's scheduler process; the plugin hooks load inside."""
    # Streams that share a hardware queue wait for each other; SGLang's 8 are fewer than decode and finetuning have.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    from sglang.srt.managers.scheduler import run_scheduler_process

    run_scheduler_process(*args, **kwargs)


def run_detokenizer(*args: Any, **kwargs: Any) -> None:
    """SGLang's detokenizer process."""
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*args, **kwargs)
