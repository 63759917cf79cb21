"""The SGLang version that the hooks were written for, and what an engine tells people of its make-up."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from core.config import Settings
from core.errors import Unavailable

SGLANG = "0.5.16"
# SGLang's arguments that people ask for, as it resolved them.
_ARGUMENTS = (
    "context_length", "chunked_prefill_size", "max_running_requests", "max_total_tokens", "mem_fraction_static",
    "attention_backend", "sampling_backend", "schedule_policy", "disable_overlap_schedule", "disable_cuda_graph",
    "max_lora_rank", "max_loras_per_batch", "lora_backend",
)  # fmt: skip


def require_sglang() -> None:
    """Raise `Unavailable` unless the installed SGLang is the one whose inner parts the hooks know."""
    try:
        found = version("sglang")
    except PackageNotFoundError as error:
        raise Unavailable("sglang_missing", f"SGLang is not installed; install sglang=={SGLANG}", "sglang") from error
    if found != SGLANG:
        raise Unavailable(
            "sglang_version",
            f"SGLang {found} is installed and Harli's hooks were written for {SGLANG}; install sglang=={SGLANG}",
            "sglang",
        )


def versions() -> dict[str, str]:
    """Versions worth reporting, by package."""
    found = {}
    for name in ("harli", "sglang", "torch", "transformers", "peft"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def in_force(arguments: Any, settings: Settings) -> dict[str, str]:
    """The settings that this engine runs with, by name: SGLang's as it resolved them, and Harli's own."""
    sglang = {f"sglang.{name}": str(getattr(arguments, name)) for name in _ARGUMENTS}
    own = {f"finetune.{name}": str(value) for name, value in settings.finetune.model_dump().items()}
    engine = {f"engine.{name}": str(getattr(settings.engine, name)) for name in ("captured", "partitions", "threads")}
    return {**engine, **own, **sglang}
