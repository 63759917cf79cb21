"""Making the engine serve the adapters that are wanted, over its own HTTP routes.

What is wanted and what is served stand in the store; each call looks for a difference and takes one step. A refusal is
kept as the adapter's error until someone asks again; an engine that does not answer is asked again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager

import httpx
from sqlalchemy.orm import Session

from core.api import schemas
from core.control.context import Control
from db import adapters as rows
from db import changes, engines
from db.adapters import AdapterRecord

logger = logging.getLogger(__name__)

# Unloading waits until the requests that use the adapter have ended.
UNLOAD_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 120.0
# How SGLang says that it has no such adapter.
_ABSENT = ("does not exist", "not loaded")

Write = Callable[[], AbstractContextManager[Session]]


class Deployer:
    """`write` opens a write transaction that fails once the dispatch lease is lost."""

    def __init__(self, control: Control, write: Write) -> None:
        self._control = control
        self._write = write

    def run(self) -> None:
        """Bring every adapter one step nearer to what is wanted."""
        with self._control.store.read() as session:
            engine = engines.current(session)
            if engine is None or engine.state != "ready":
                return
            url = str(engine.hello["http_url"])
            pending = [record for record in rows.everything(session) if self._differs(record, engine.id)]
        if not pending:
            return
        with httpx.Client(base_url=url, timeout=LOAD_TIMEOUT_S, trust_env=False) as http:
            for record in pending:
                try:
                    self._step(http, engine.id, record)
                except httpx.TransportError as error:
                    logger.info("engine %s does not answer about adapter %s: %s", engine.id, record.name, error)
                    return

    @staticmethod
    def _differs(record: AdapterRecord, engine_id: str) -> bool:
        if record.deployment == "failed":
            return False
        served = record.deployed_version if record.engine_id == engine_id else None
        return served != record.wanted_version or record.deleted

    def _step(self, http: httpx.Client, engine_id: str, record: AdapterRecord) -> None:
        name, wanted = record.name, record.wanted_version
        if record.engine_id == engine_id and record.deployed_version is not None:
            self._unload(http, engine_id, name)
        elif wanted is not None:
            self._load(http, engine_id, name, wanted)
        else:
            self._note(engine_id, name, None, None)

    def _load(self, http: httpx.Client, engine_id: str, name: str, version: int) -> None:
        body = {"lora_name": name, "lora_path": str(self._control.adapter_folder(name, version))}
        answer = http.post("/load_lora_adapter", json=body)
        if answer.is_error and "already loaded" in answer.text:
            # Loaded by a dispatcher that ended before it could say so; which version is not known.
            http.post("/unload_lora_adapter", json={"lora_name": name}, timeout=UNLOAD_TIMEOUT_S)
            answer = http.post("/load_lora_adapter", json=body)
        if answer.is_error:
            self._note(engine_id, name, None, self._refusal("load", f"{name}@{version}", answer))
        else:
            logger.info("engine %s serves adapter %s@%d", engine_id, name, version)
            self._note(engine_id, name, version, None)

    def _unload(self, http: httpx.Client, engine_id: str, name: str) -> None:
        try:
            answer = http.post("/unload_lora_adapter", json={"lora_name": name}, timeout=UNLOAD_TIMEOUT_S)
        except httpx.ReadTimeout:
            # The engine goes on waiting for its requests; what it says the next time tells whether it is through.
            message = f"requests have used adapter {name} for {UNLOAD_TIMEOUT_S:g} s; the engine waits for their end"
            with self._write() as session:
                record = session.get(AdapterRecord, name)
                if record is not None:
                    record.error = schemas.ErrorDetail(code="unload_waits", message=message).model_dump()
                    changes.add(session, "adapters", "unloading", name, tenant=record.tenant, message=message)
            return
        absent = any(words in answer.text for words in _ABSENT)
        if not answer.is_error or absent:
            self._note(engine_id, name, None, None)
            return
        with self._write() as session:
            record = session.get(AdapterRecord, name)
            if record is not None:
                self._fail(session, record, self._refusal("unload", name, answer))

    def _note(self, engine_id: str, name: str, version: int | None, error: schemas.ErrorDetail | None) -> None:
        """Write down what the engine serves under the name by now, and how that stands to what is wanted."""
        with self._write() as session:
            record = session.get(AdapterRecord, name)
            if record is None:
                return
            record.engine_id, record.deployed_version, record.error = engine_id, version, None
            if error is not None and record.wanted_version is not None:
                self._fail(session, record, error)
                return
            if record.deleted and version is None:
                rows.remove(session, name)
            elif record.wanted_version == version:
                record.deployment = "deployed" if version is not None else "none"
            else:
                record.deployment = "unloading" if version is not None else "loading"
            changes.add(session, "adapters", record.deployment, name, tenant=record.tenant, version=version)

    @staticmethod
    def _fail(session: Session, record: AdapterRecord, error: schemas.ErrorDetail) -> None:
        record.deployment = "failed"
        record.error = error.model_dump()
        changes.add(session, "adapters", "failed", record.name, tenant=record.tenant, message=error.message)

    @staticmethod
    def _refusal(what: str, name: str, answer: httpx.Response) -> schemas.ErrorDetail:
        try:
            body = answer.json()
            reason = body.get("error_message") or body.get("message") or answer.text
        except ValueError:
            reason = answer.text
        return schemas.ErrorDetail(code=f"{what}_refused", message=f"the engine did not {what} {name}: {reason[:500]}")
