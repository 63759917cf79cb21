"""Adapters exchanged under a name that answers all the while: with SGLang's own registry, without an engine."""

from __future__ import annotations

import asyncio
import importlib.util
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("sgl_kernel") is None:
    from core.serving import cpu_standin

    cpu_standin.install()

from sglang.srt.lora.lora_registry import LoRARef, LoRARegistry
from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput, LoRAUpdateOutput

from core.serving import exchange


@dataclass
class Manager:
    """What of SGLang's tokenizer manager takes part; `backend` are the names that the scheduler has loaded, by id."""

    lora_registry: LoRARegistry = field(default_factory=LoRARegistry)
    lora_update_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    lora_ref_cache: dict[str, LoRARef] = field(default_factory=dict)
    backend: dict[str, str] = field(default_factory=dict)
    refuses: bool = False

    async def update_lora_adapter_communicator(self, request: Any) -> list[Any]:
        del self.backend[request.lora_id]
        return [SimpleNamespace(success=True)]

    async def load(self, name: str, path: str) -> LoRAUpdateOutput:
        found: LoRAUpdateOutput = await exchange.load(
            _load, self, LoadLoRAAdapterReqInput(lora_name=name, lora_path=path)
        )
        return found


async def _load(manager: Manager, wanted: LoadLoRAAdapterReqInput) -> LoRAUpdateOutput:
    """SGLang's own loading: the scheduler refuses a name that it has."""
    if manager.refuses or wanted.lora_name in manager.backend.values():
        return LoRAUpdateOutput(success=False, error_message=f"Failed to load {wanted.lora_name}")
    reference = LoRARef(lora_name=wanted.lora_name, lora_path=wanted.lora_path, pinned=wanted.pinned)
    await asyncio.sleep(0.02)
    manager.backend[reference.lora_id] = wanted.lora_name
    await manager.lora_registry.register(reference)
    manager.lora_ref_cache[wanted.lora_name] = reference
    return LoRAUpdateOutput(success=True)


@pytest.fixture(autouse=True)
def _no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_GRACE_S", 0.01)


def path_of(manager: Manager, name: str) -> str:
    return str(manager.lora_registry.get_all_adapters()[name].lora_path)


def test_the_name_answers_all_the_while_and_the_old_one_goes_when_its_requests_have_ended() -> None:
    async def run() -> None:
        manager = Manager()
        registry = manager.lora_registry
        assert (await manager.load("captain@prod", "/one")).success
        user = await registry.acquire("captain@prod")
        loading = asyncio.create_task(manager.load("captain@prod", "/two"))
        while not loading.done():
            await registry.release(await registry.acquire("captain@prod"))
            await asyncio.sleep(0)
        assert loading.result().success
        assert path_of(manager, "captain@prod") == "/two"
        assert list(registry.get_all_adapters()) == ["captain@prod"]
        assert (await registry.acquire("captain@prod")) != user
        await asyncio.sleep(0.05)
        assert user in manager.backend, "a request still uses it"
        await registry.release(user)
        for _ in range(100):
            await asyncio.sleep(0.01)
            if user not in manager.backend:
                break
        assert len(manager.backend) == 1
        assert manager.lora_ref_cache.keys() == {"captain@prod"}

    asyncio.run(run())


def test_an_adapter_that_is_refused_leaves_the_one_that_is_served() -> None:
    async def run() -> None:
        manager = Manager()
        await manager.load("captain", "/one")
        manager.refuses = True
        refused = await manager.load("captain", "/two")
        assert (refused.success, refused.error_message) == (False, "Failed to load captain")
        assert path_of(manager, "captain") == "/one"
        assert len(manager.backend) == 1

    asyncio.run(run())


def test_what_it_was_loaded_as_tells_what_it_is_served_as() -> None:
    async def run() -> None:
        manager = Manager()
        await manager.load("captain@prod", "/one")
        assert [exchange.name_of(loaded) for loaded in manager.backend.values()] == ["captain@prod"]
        assert exchange.name_of("captain") == "captain"

    asyncio.run(run())
