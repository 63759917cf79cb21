"""Harli's SGLang plugin (entry point group ``sglang.srt.plugins``): the hooks that bring the runtime in.

Inert in any SGLang that Harli did not start: without `ENGINE_ID` in the environment nothing is registered. SGLang logs
and swallows a plugin's errors, so the launcher checks afterwards that the runtime reported itself (`activation`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

ENGINE_ID = "HARLI_ENGINE_ID"

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_KV_CACHE = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_OPENAI = "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase"
_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_SIGNALS = "sglang.srt.managers.tokenizer_manager.SignalHandler"


def register() -> None:
    """Called by SGLang in each of its processes."""
    if ENGINE_ID not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from core.serving import exchange
    from core.serving.versions import require_sglang

    require_sglang()
    around = HookType.AROUND
    HookRegistry.register(f"{_SCHEDULER}.run_event_loop", _run_event_loop, around)
    HookRegistry.register(f"{_SCHEDULER}.run_batch", _run_batch, around)
    HookRegistry.register(f"{_SCHEDULER}.process_batch_result", _process_batch_result, around)
    HookRegistry.register(f"{_SCHEDULER}.on_idle", _on_idle, around)
    HookRegistry.register(f"{_SCHEDULER}.get_next_batch_to_run", _get_next_batch_to_run, around)
    HookRegistry.register(f"{_SCHEDULER}.handle_generate_request", _handle_generate_request, around)
    HookRegistry.register(f"{_SCHEDULER}.get_next_disagg_decode_batch_to_run", _next_decode_only_batch, around)
    HookRegistry.register(f"{_KV_CACHE}._build_token_to_kv_pool", _build_token_to_kv_pool, around)
    HookRegistry.register(f"{_KV_CACHE}._build_mha_kv_pool", _build_mha_kv_pool, around)
    HookRegistry.register(f"{_KV_CACHE}._build_token_to_kv_pool_allocator", _build_slot_allocator, around)
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":  # whose LoRA kernels are torch's own
        from core.serving import lora_batch, lora_kernels

        HookRegistry.register(lora_batch.TARGET, lora_batch.prepare_lora_batch, around)
        HookRegistry.register(lora_kernels.SHRINK, lora_kernels.shrink, around)
        HookRegistry.register(lora_kernels.EXPAND, lora_kernels.expand, around)
        HookRegistry.register(lora_kernels.PRODUCT, lora_kernels.product, around)
    else:
        from core.serving import processes

        HookRegistry.register(processes.LAUNCH, processes.fork, around)
        HookRegistry.register(processes.TOKENIZER, processes.tokenizer_once, around)
    HookRegistry.register(f"{_OPENAI}._parse_model_parameter", _parse_model_parameter, around)
    HookRegistry.register(f"{_MANAGER}.load_lora_adapter", exchange.load, around)
    HookRegistry.register(f"{_SIGNALS}.sigterm_handler", _sigterm, HookType.REPLACE)


class _Leave(Exception):
    """Ends the loops of a decode-only scheduler: those do not look at `gracefully_exit`."""


# ---- scheduler process -----------------------------------------------------------------------------------------------


def _run_event_loop(original: Callable[[Any], None], scheduler: Any) -> None:
    from core.serving.attach import Attachment

    scheduler.harli = attachment = Attachment(scheduler)
    try:
        with suppress(_Leave):
            original(scheduler)
    finally:
        attachment.runtime.close()


def _run_batch(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    scheduler.harli.step_begins(batch)
    result = original(scheduler, batch, *args, **kwargs)
    scheduler.harli.step_launched(batch)
    return result


def _process_batch_result(original: Callable[..., Any], scheduler: Any, batch: Any, result: Any) -> None:
    original(scheduler, batch, result)
    scheduler.harli.step_ended(batch)


def _get_next_batch_to_run(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    scheduler.harli.between_batches()
    return original(scheduler, *args, **kwargs)


def _handle_generate_request(original: Callable[[Any, Any], None], scheduler: Any, request: Any) -> None:
    original(scheduler, request)
    scheduler.harli.request_came()


def _next_decode_only_batch(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    if scheduler.gracefully_exit:
        raise _Leave
    return original(scheduler, *args, **kwargs)


def _on_idle(original: Callable[[Any], None], scheduler: Any) -> None:
    if not scheduler.harli.idle():
        original(scheduler)


# ---- KV cache, in the scheduler process ------------------------------------------------------------------------------


def _elastic(configurator: Any) -> bool:
    """Whether the KV cache is to lie on the arena."""
    from core.config import Settings

    wanted = Settings().engine.elastic_kv
    # A prefill peer is told the addresses of the whole KV cache once, and writes there.
    alone: bool = configurator.server_args.disaggregation_mode == "null"
    return (configurator.device == "cpu" and alone) if wanted is None else wanted


def _build_token_to_kv_pool(original: Callable[..., Any], configurator: Any, **kwargs: Any) -> Any:
    made = original(configurator, **kwargs)
    if _elastic(configurator):
        from core.serving import elastic_pool

        elastic_pool.require(made)
    return made


def _build_mha_kv_pool(
    original: Callable[..., Any], configurator: Any, *, mha_pool_class: type, quant_method: Any = None, **kwargs: Any
) -> Any:
    if _elastic(configurator):
        from core.serving import elastic_pool

        mha_pool_class = elastic_pool.pool(configurator, mha_pool_class, quant_method)
    return original(configurator, mha_pool_class=mha_pool_class, quant_method=quant_method, **kwargs)


def _build_slot_allocator(original: Callable[..., Any], configurator: Any, **kwargs: Any) -> Any:
    made = original(configurator, **kwargs)
    if _elastic(configurator):
        from core.serving import elastic_pool

        made = elastic_pool.allocator(made)
    return made


# ---- HTTP process ----------------------------------------------------------------------------------------------------


def _parse_model_parameter(original: Callable[..., Any], serving: Any, model: str) -> tuple[str, str | None]:
    """Lets a request name an adapter as its model, as OpenAI clients do, and refuses a model that is not there."""
    from fastapi import HTTPException

    base, adapter = original(serving, model)
    manager = serving.tokenizer_manager
    served = manager.served_model_name
    adapters = manager.lora_registry.get_all_adapters() if manager.server_args.enable_lora else {}
    names = {reference.lora_name for reference in adapters.values()}
    if adapter is None and base in names:
        base, adapter = served, base
    # SGLang's own default for a request that names no model.
    if base not in {served, "default"} or (adapter is not None and adapter not in names):
        raise HTTPException(
            status_code=404,
            detail=f"model {model!r} is not served here; there are {', '.join([served, *sorted(names)])}",
        )
    return base, adapter


def _sigterm(handler: Any, signum: int | None = None, frame: Any = None) -> None:
    """SGLang would wait for every stream to end first; a finetune job's checkpoint comes before that."""
    from core.serving.launch import stop_engine

    stop_engine(handler.tokenizer_manager)
