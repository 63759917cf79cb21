"""SGLang's child processes: their entry points, and how they begin.

On a GPU SGLang spawns its scheduler and detokenizer, since CUDA does not survive a fork; each imports everything anew.
On a CPU they are forked, and have what their parent has imported and the tokenizer that it has loaded: half of the CPU
time of a start. Importing this module is what puts the CPU stand-in in place, ahead of SGLang.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    from core.serving import cpu_standin

    cpu_standin.install()


LAUNCH = "sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes"
TOKENIZER = "sglang.srt.utils.hf_transformers.tokenizer.get_tokenizer"


def fork(original: Callable[..., Any], engine: type, server_args: Any, *args: Any) -> Any:
    """Forks the scheduler, and the detokenizer that SGLang starts next. The parent must not have run anything in
    OpenMP's threads: a child would wait for them for ever."""
    if not server_args.skip_tokenizer_init:
        _load_tokenizer(server_args)
    # A child's collector would write to all that it shares with its parent, and so copy it.
    gc.freeze()
    multiprocessing.set_start_method("fork", force=True)
    return original(engine, server_args, *args)


@functools.cache
def tokenizer_once(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The tokenizer that these arguments have given before, in this process or in the one that it was forked from."""
    return original(*args, **kwargs)


def _load_tokenizer(server_args: Any) -> None:
    from sglang.srt.utils.hf_transformers.tokenizer import get_tokenizer

    # As the three processes ask for it; the order counts.
    get_tokenizer(
        server_args.tokenizer_path,
        tokenizer_mode=server_args.tokenizer_mode,
        trust_remote_code=server_args.trust_remote_code,
        revision=server_args.revision,
        tokenizer_backend=server_args.tokenizer_backend,
    )


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """SGLang's scheduler process; the plugin hooks load inside."""
    gc.enable()  # a process that is forked has it off
    # Streams that share a hardware queue wait for each other; SGLang's 8 are fewer than decode and finetuning have.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    from sglang.srt.managers.scheduler import run_scheduler_process

    run_scheduler_process(*args, **kwargs)


def run_detokenizer(*args: Any, **kwargs: Any) -> None:
    """SGLang's detokenizer process."""
    gc.enable()
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*args, **kwargs)
