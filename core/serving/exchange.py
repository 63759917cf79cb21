"""Adapters that take each other's place under a name, which answers all the while.

SGLang loads no second adapter under a name, and takes one away only once no request uses it: in between the name would
be gone. Here a new adapter is loaded beside the old one, under a name of its own; then the name is given to it, in one
move; the old one goes when the requests that use it have ended.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

logger = logging.getLogger(__name__)

_MARK = "#"
# A request that has looked a name up counts itself among the adapter's users a moment later.
_GRACE_S = 1.0
_draining: set[asyncio.Task[None]] = set()


def name_of(loaded: str) -> str:
    """The name that an adapter is served under, of the one that it was loaded under."""
    return loaded.partition(_MARK)[0]


async def load(original: Callable[..., Awaitable[Any]], manager: Any, wanted: Any, *rest: Any) -> Any:
    """Around `TokenizerManager.load_lora_adapter`: what is served under the name already makes room for `wanted`."""
    name = str(wanted.lora_name)
    wanted.lora_name = f"{name}{_MARK}{secrets.token_hex(4)}"
    result = await original(manager, wanted, *rest)
    if result.success:
        old = await _give(manager, name, wanted.lora_name)
        if old is not None:
            task = asyncio.get_running_loop().create_task(_drain(manager, old))
            _draining.add(task)
            task.add_done_callback(_draining.discard)
    elif result.error_message:
        result.error_message = result.error_message.replace(wanted.lora_name, name)
    return result


async def _give(manager: Any, name: str, loaded: str) -> Any:
    """Let the name stand for what was just loaded; what it stood for before, None when for nothing."""
    registry = manager.lora_registry
    async with registry._registry_lock.writer_lock:
        new = registry._registry.pop(loaded)
        old = registry._registry.get(name)
        served = type(new)(lora_id=new.lora_id, lora_name=name, lora_path=new.lora_path, pinned=new.pinned)
        registry._registry[name] = served
    manager.lora_ref_cache.pop(loaded, None)
    manager.lora_ref_cache[name] = served
    return old


async def _drain(manager: Any, old: Any) -> None:
    from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

    await asyncio.sleep(_GRACE_S)
    await manager.lora_registry.wait_for_unload(old.lora_id)
    async with manager.lora_update_lock:
        request = UnloadLoRAAdapterReqInput(lora_name=old.lora_name, lora_id=old.lora_id)
        result = (await manager.update_lora_adapter_communicator(request))[0]
    if not result.success:
        logger.error("the adapter that was %s before is not unloaded: %s", old.lora_name, result.error_message)
